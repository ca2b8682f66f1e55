"""Torch's fused list operations do what one operation per tensor does, and are still there."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise.interop.torch import foreach
from tests.support.equality import assert_equal

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]


# Shapes and dtypes of some tensors.
forms = st.lists(st.tuples(st.lists(st.integers(0, 4), max_size=3), st.sampled_from(DTYPES)), max_size=6)
seeds = st.integers(0, 2**32 - 1)


def drawn(forms: list[tuple[list[int], torch.dtype]]) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for shape, dtype in forms]


def places(tensors: list[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


@settings(deadline=None)
@given(
    seed=seeds,
    forms=forms,
    factor=st.floats(-1e3, 1e3, allow_subnormal=False),
    kind=st.sampled_from([None, torch.float64, torch.float32]),
)
def test_multiplies_every_tensor_in_place(seed: int, forms: Any, factor: float, kind: torch.dtype | None) -> None:
    torch.manual_seed(seed)
    tensors = drawn(forms)
    value = factor if kind is None else torch.tensor(factor, dtype=kind)
    expected = [tensor.clone().mul_(value) for tensor in tensors]
    before = places(tensors)
    foreach.multiply_(tensors, value)
    for tensor, other in zip(tensors, expected, strict=True):
        if tensor.dtype in (torch.float16, torch.bfloat16):  # here the factor itself may be rounded
            torch.testing.assert_close(tensor, other, rtol=2 * torch.finfo(tensor.dtype).eps, atol=1e-6)
        else:
            assert tensor.dtype == other.dtype
            assert torch.equal(tensor, other)
    assert places(tensors) == before


def embedding_gradient(sparse: bool) -> Tensor:
    """The gradient of an embedding, one of whose rows was used twice."""
    embedding = torch.nn.Embedding(5, 3, sparse=sparse)
    embedding(torch.tensor([1, 3, 3])).sum().backward()
    return embedding.weight.grad


@pytest.mark.parametrize("factor", [0.5, torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64)])
def test_sparse_gradients_are_multiplied(factor: float | Tensor) -> None:
    tensors = [embedding_gradient(sparse=True), torch.randn(3)]
    expected = [tensor.to_dense() * 0.5 for tensor in tensors]
    foreach.multiply_(tensors, factor)
    assert tensors[0].is_sparse
    assert_equal(expected, [tensor.to_dense() for tensor in tensors])


@settings(deadline=None)
@given(seed=seeds, forms=forms)
def test_adds_to_and_copies_into_every_tensor_in_place(seed: int, forms: Any) -> None:
    torch.manual_seed(seed)
    tensors, others = drawn(forms), drawn(forms)
    sums = [tensor + other for tensor, other in zip(tensors, others, strict=True)]
    before = places(tensors)
    foreach.add_(tensors, others)
    assert_equal(sums, tensors)
    foreach.copy_(tensors, others)
    assert_equal(others, tensors)
    assert places(tensors) == before


def test_copies_come_from_other_dtypes_and_layouts() -> None:
    tensors = [torch.zeros(2, 3), torch.zeros(3, 2).t(), torch.zeros(2)]
    others = [torch.arange(6.0).reshape(2, 3).double(), torch.arange(6.0).reshape(2, 3), torch.tensor(4.0).expand(2)]
    foreach.copy_(tensors, others)
    assert_equal([other.float().contiguous() for other in others], tensors)


@pytest.mark.parametrize("sparse", [(True, True), (False, True), (False, False)])
def test_sparse_gradients_are_added(sparse: tuple[bool, bool]) -> None:
    first, other = map(embedding_gradient, sparse)
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
