"""Storages that change their size without an operation, and wrappers whose memory is that of another tensor."""

from typing import Any

import torch
from torch import Tensor, nn

from equipoise.interop.torch.dispatch import tensor_in_memory
from equipoise.memory.profile.ledger import Ledger


class Wrapper(Tensor):
    """Has the shape of a whole, of which it keeps the first rows, as the shard of a sharded weight."""

    def __new__(cls, part: Tensor, rows: int) -> "Wrapper":
        return Tensor._make_wrapper_subclass(cls, (rows, *part.shape[1:]), dtype=part.dtype)

    def __init__(self, part: Tensor, rows: int) -> None:
        self.part = part
        self.mesh = "no tensor"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        # A `DTensor` names its mesh, too.
        return ["part", "mesh"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], context: Any, size: Any, stride: Any) -> "Wrapper":
        return Wrapper(parts["part"], size[0])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(arg.part if isinstance(arg, Wrapper) else arg for arg in args), **(kwargs or {}))


def test_a_wrapper_has_the_memory_of_its_part() -> None:
    part = torch.ones(2, 8)
    wrapper = Wrapper(part, 16)
    assert wrapper.shape == (16, 8)
    assert tensor_in_memory(wrapper) is part
    assert tensor_in_memory(part) is part
    ledger = Ledger(nn.Linear(1, 1, bias=False))
    ledger.start()
    before = ledger.peak("cpu").nbytes
    ledger.add_batch([wrapper])
    ledger.stop()
    assert ledger.peak("cpu").nbytes == before + part.nbytes


def test_a_gathered_weight_has_memory_while_it_is_whole() -> None:
    weight = torch.ones(1000)
    weight.untyped_storage().resize_(0)
    ledger = Ledger(nn.Linear(1, 1, bias=False), watches_sizes=True)
    ledger.start()
    before = ledger.peak("cpu").nbytes
    ledger.add_gathered([weight])
    assert ledger.peak("cpu").nbytes == before

    weight.untyped_storage().resize_(4000)
    _ = torch.ones(1)
    peak = ledger.peak("cpu")
    assert peak.nbytes == before + 4000 + 4

    weight.untyped_storage().resize_(0)
    _ = torch.ones(1)
    ledger.forget_peaks()
    ledger.stop()
    assert ledger.peak("cpu").nbytes == before + 4
    assert sum(holder.nbytes for holder in peak.holders if holder.category == "parameter") == 4 + 4000
