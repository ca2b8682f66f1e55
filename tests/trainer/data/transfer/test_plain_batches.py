"""Which tensors of a batch a side stream may copy, and which batches are left to their own classes."""

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn

from equipoise.trainer.data.transfer.plain_batches import foreign_type, host_tensors, with_copies

CPU = torch.device("cpu")


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass
class Sample:
    x: Tensor


class Own:
    def to(self, device: torch.device) -> "Own":
        return self


class Names(UserDict[str, Any]):
    pass


def tensor(value: float = 1.0) -> Tensor:
    return torch.full((2,), value)


PLAIN = {
    "tensor": lambda: tensor(),
    "tuple": lambda: (tensor(), tensor(2)),
    "nested": lambda: [tensor(), {"x": tensor(2), "y": (tensor(3), "name")}, 4, None],
    "named tuple": lambda: Pair(tensor(), [tensor(2)]),
    "empty": list,
    "no tensors": lambda: {"text": "abc", "bytes": b"abc", "array": np.ones(2), "set": {1, 2}, "number": 1j},
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_batches(name: str) -> None:
    batch = PLAIN[name]()
    assert foreign_type(batch) is None
    tensors = host_tensors(batch)
    copies = [each.clone() for each in tensors]
    result = with_copies(batch, iter(copies), CPU)
    expected = move_data_to_device(batch, CPU)
    assert repr(result) == repr(expected)
    assert type(result) is type(expected)
    assert [id(each) for each in host_tensors(result)] == [id(each) for each in copies]


def test_a_tensor_that_occurs_twice_has_two_copies() -> None:
    one = tensor()
    assert len(host_tensors([one, one])) == 2


@pytest.mark.parametrize("value", [nn.Parameter(tensor()), tensor().requires_grad_(), tensor().to_sparse()])
def test_tensors_whose_copy_is_more_than_their_values(value: Tensor) -> None:
    assert foreign_type([value]) is None
    assert host_tensors([value, tensor(3)])[0].tolist() == [3, 3]
    result = with_copies([value, tensor(3)], iter([tensor(4)]), CPU)
    assert result[0] is value
    assert result[1].tolist() == [4, 4]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (Own(), Own),
        (Sample(tensor()), Sample),
        (OrderedDict(x=tensor()), OrderedDict),
        (Names(x=tensor()), Names),
        (torch.Size([2]), torch.Size),
        (nn.utils.rnn.pack_sequence([tensor()]), nn.utils.rnn.PackedSequence),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_objects_that_copy_themselves(value: Any, kind: type) -> None:
    assert foreign_type(value) is kind
    assert foreign_type([tensor(), {"value": value}]) is kind
