"""Objects that go to other processes: what they share, what stays theirs, what cannot go."""

import traceback
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from equipoise.errors import ConfigurationError
from equipoise.parallel.payload.object_pickling import can_be_packed
from equipoise.parallel.payload.shared_payload import SharedPayload
from tests.support.equality import assert_equal


@pytest.fixture
def package() -> Any:
    made = SharedPayload()
    yield made
    made.close()


class Holds:
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


def test_tensors_of_every_kind_arrive_as_they_were(package: SharedPayload) -> None:
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
    assert_equal(values, read)
    assert [tensor.stride() for tensor in read[:6]] == [tensor.stride() for tensor in values[:6]]
    assert isinstance(read[7], nn.Parameter)
    read[0][3] = 100
    assert read[1][0, 0] == 100  # as they shared memory before
    assert base[3] == 3  # and nobody else sees it
    read[8][0] = 7  # arrays may be written to


def test_each_tensor_has_memory_of_its_own(package: SharedPayload) -> None:
    """Saved alone, it takes no other along."""
    small, _ = package.unpack(package.pack([torch.ones(2), torch.ones(10**6)]))
    assert small.untyped_storage().nbytes() == 8


def test_what_is_defined_here_keeps_its_file_and_lines(package: SharedPayload) -> None:
    def outer() -> Any:
        return lambda: 1 / 0

    copy = package.unpack(package.pack(outer))
    with pytest.raises(ZeroDivisionError) as caught:
        copy()()
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert frames[-1].filename == __file__
    assert "1 / 0" in str(frames[-1].line)


def test_a_payload_is_written_anew_for_each_answer(package: SharedPayload) -> None:
    assert package.unpack(package.pack(torch.ones(1000))).sum() == 1000
    assert package.unpack(package.pack("short")) == "short"


STREAM = iter(x for x in "")


@pytest.mark.parametrize(
    "value", [Holds(inner=Holds(stream=STREAM)), Holds(hook=lambda: STREAM)], ids=["an attribute", "a closure"]
)
def test_what_cannot_be_sent_is_refused(value: Any, package: SharedPayload) -> None:
    assert not can_be_packed(value)
    with pytest.raises(ConfigurationError, match=r"generator.* cannot be sent"):
        package.pack(value)
