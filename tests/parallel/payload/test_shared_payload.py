"""Objects that go to other processes: what they share, what stays theirs, what cannot go."""

import os
import traceback
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from equipoise.errors import ConfigurationError
from equipoise.parallel.payload.object_pickling import can_be_packed
from equipoise.parallel.payload.shared_payload import SharedPayload
from equipoise.parallel.payload.unpicklable_parts import find_unpicklable


@pytest.fixture
def package() -> Any:
    made = SharedPayload()
    yield made
    made.close()


class Holds:
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


def test_tensors_of_every_kind(package: SharedPayload) -> None:
    base = torch.arange(12.0)
    values = [
        base,
        base[3:9].view(2, 3).t(),  # a view of the same memory
        torch.zeros(0, 3),
        torch.tensor(5, dtype=torch.int16),
        torch.randn(2, requires_grad=True),
        torch.randn(3, dtype=torch.complex64),
        torch.ones(2, 2).to_sparse(),
        nn.Parameter(torch.ones(2), requires_grad=False),
        np.arange(5),
        {"nested": (torch.ones(2, dtype=torch.bfloat16),)},
    ]
    read = package.unpack(package.pack(values))
    for expected, actual in zip(values[:6], read[:6], strict=True):
        assert torch.equal(expected, actual)
        assert (expected.dtype, expected.stride(), expected.requires_grad) == (
            actual.dtype,
            actual.stride(),
            actual.requires_grad,
        )
    assert torch.equal(values[6].to_dense(), read[6].to_dense())
    assert isinstance(read[7], nn.Parameter)
    assert not read[7].requires_grad
    assert read[8].tolist() == [0, 1, 2, 3, 4]
    read[0][3] = 100
    assert read[1][0, 0] == 100  # as they shared memory before
    assert base[3] == 3  # and nobody else sees it
    read[8][0] = 7


def test_a_module_keeps_its_ties_and_its_state(package: SharedPayload) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    module[1].weight = module[0].weight
    read = package.unpack(package.pack(module))
    assert read[1].weight is read[0].weight
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, read.state_dict()[name])
    read(torch.randn(3, 2)).sum().backward()
    torch.save(read.state_dict(), os.devnull)


def test_each_tensor_has_memory_of_its_own(package: SharedPayload) -> None:
    """Saved alone, it takes no other along."""
    small, _ = package.unpack(package.pack([torch.ones(2), torch.ones(10**6)]))
    assert small.untyped_storage().nbytes() == 8


def test_what_is_known_is_not_sent(package: SharedPayload) -> None:
    known = [Holds(), Holds()]
    layout = package.pack({"first": known[0], "list": [known[1], known[1]]}, known)
    others = [Holds(), Holds()]
    read = package.unpack(layout, others)
    assert read["first"] is others[0]
    assert read["list"] == [others[1], others[1]]


def test_what_is_defined_here_keeps_its_file_and_lines(package: SharedPayload) -> None:
    def outer() -> Any:
        return lambda: 1 / 0

    copy = package.unpack(package.pack(outer))
    with pytest.raises(ZeroDivisionError) as caught:
        copy()()
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert frames[-1].filename == __file__
    assert "1 / 0" in str(frames[-1].line)


def test_large_and_small_in_turn(package: SharedPayload) -> None:
    """A package is written anew for each answer."""
    assert package.unpack(package.pack(torch.ones(1000))).sum() == 1000
    assert package.unpack(package.pack("short")) == "short"


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (Holds(inner=Holds(stream=iter(x for x in ""))), "Holds.inner.stream"),
        ((partial(print, Holds(stream=iter(x for x in ""))),), "Holds.stream"),
        ([{"a": 1}, {"module": Holds(items=[1, iter(x for x in "")])}], "Holds.items"),
    ],
)
def test_what_cannot_be_sent_is_found(value: Any, path: str, package: SharedPayload) -> None:
    assert not can_be_packed(value)
    found, part = find_unpicklable(value)
    assert type(part).__name__ == "generator"
    assert found.startswith(path) or found == "generator"
    with pytest.raises(ConfigurationError, match=r"generator.* cannot be sent"):
        package.pack(value)


def test_a_closure_names_its_variable(package: SharedPayload) -> None:
    stream = iter(x for x in "")
    with pytest.raises(ConfigurationError, match="generator"):
        package.pack(Holds(hook=lambda: stream))
