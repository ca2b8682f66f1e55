"""Torch's fused list operations do what one operation per tensor does, and are still there."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise.interop.torch import foreach

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=6),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=6, max_size=6),
    factor=st.floats(-1e3, 1e3, allow_subnormal=False),
    kind=st.sampled_from([None, torch.float64, torch.float32]),
)
def test_multiplies_every_tensor_in_place(
    seed: int, shapes: list[list[int]], dtypes: list[torch.dtype], factor: float, kind: torch.dtype | None
) -> None:
    torch.manual_seed(seed)
    tensors = [torch.randn(shape).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=False)]
    value = factor if kind is None else torch.tensor(factor, dtype=kind)
    expected = [tensor.clone().mul_(value) for tensor in tensors]
    storage = [tensor.data_ptr() for tensor in tensors]
    foreach.multiply_(tensors, value)
    for tensor, other in zip(tensors, expected, strict=True):
        if tensor.dtype in (torch.float16, torch.bfloat16):  # here the factor itself may be rounded
            torch.testing.assert_close(tensor, other, rtol=2 * torch.finfo(tensor.dtype).eps, atol=1e-6)
        else:
            assert tensor.dtype == other.dtype
            assert torch.equal(tensor, other)
    assert [tensor.data_ptr() for tensor in tensors] == storage


@pytest.mark.parametrize("factor", [0.5, torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64)])
def test_sparse_gradients(factor: float | Tensor) -> None:
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    linear = torch.nn.Linear(3, 1)
    linear(embedding(torch.tensor([1, 3, 3]))).sum().backward()
    tensors = [embedding.weight.grad, linear.weight.grad]
    expected = [copy.deepcopy(t).to_dense() * 0.5 for t in tensors]
    foreach.multiply_(tensors, factor)
    assert tensors[0].is_sparse
    assert all(torch.equal(t.to_dense(), e) for t, e in zip(tensors, expected, strict=True))


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=6),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=6, max_size=6),
)
def test_adds_to_and_copies_into_every_tensor_in_place(
    seed: int, shapes: list[list[int]], dtypes: list[torch.dtype]
) -> None:
    torch.manual_seed(seed)
    tensors, others = (
        [torch.randn(shape).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=False)] for _ in range(2)
    )
    sums = [tensor + other for tensor, other in zip(tensors, others, strict=True)]
    storage = [tensor.data_ptr() for tensor in tensors]
    foreach.add_(tensors, others)
    assert all(map(torch.equal, tensors, sums))
    foreach.copy_(tensors, others)
    assert all(map(torch.equal, tensors, others))
    assert [tensor.data_ptr() for tensor in tensors] == storage


def test_copies_come_from_other_dtypes_and_layouts() -> None:
    tensors = [torch.zeros(2, 3), torch.zeros(3, 2).t(), torch.zeros(2)]
    others = [torch.arange(6.0).reshape(2, 3).double(), torch.arange(6.0).reshape(2, 3), torch.tensor(4.0).expand(2)]
    foreach.copy_(tensors, others)
    assert all(torch.equal(tensor, other.float()) for tensor, other in zip(tensors, others, strict=True))


@pytest.mark.parametrize("sparse", [(True, True), (False, True), (False, False)])
def test_sparse_gradients_are_added(sparse: tuple[bool, bool]) -> None:
    tensors = []
    for each in sparse:
        embedding = torch.nn.Embedding(5, 3, sparse=each)
        embedding(torch.tensor([1, 3, 3])).sum().backward()
        tensors.append(embedding.weight.grad)
    first, other = tensors
    expected = first.to_dense() + other.to_dense()
    dense = torch.ones(2)
    foreach.add_([first, dense], [other, torch.ones(2)])
    assert first.is_sparse is sparse[0]
    assert torch.equal(first.to_dense(), expected)
    assert dense.tolist() == [2, 2]


def test_a_factor_that_lies_elsewhere_is_moved() -> None:
    """The meta device stands for any other: it refuses an operand of a device of its own choice."""
    here, there = torch.ones(3), torch.ones(3, device="meta")
    foreach.multiply_([there, here], torch.tensor(0.5))
    assert torch.equal(here, torch.full((3,), 0.5))
    with pytest.raises(RuntimeError):
        foreach.multiply_([here], torch.tensor(0.5, device="meta"))  # no value to move
