"""Torch's fused list operations do what one operation per tensor does, and are still there."""

import pytest
import torch
from torch import Tensor

from equipoise.interop.torch import foreach
from tests.support.equality import assert_equal


@pytest.mark.parametrize("factor", [0.1, torch.tensor(0.1), torch.tensor(0.1, dtype=torch.float64)])
def test_multiplies_every_tensor_in_place(factor: float | Tensor) -> None:
    dtypes = (torch.float64, torch.float32, torch.complex64, torch.bfloat16)
    tensors = [torch.randn(shape).to(dtype) for dtype in dtypes for shape in ((), (2, 3), (0, 2))]
    expected = [tensor.clone().mul_(factor) for tensor in tensors]
    before = list(tensors)
    foreach.multiply_(tensors, factor)
    assert all(tensor is one for tensor, one in zip(tensors, before, strict=True))
    for tensor, other in zip(tensors, expected, strict=True):
        assert tensor.dtype == other.dtype
        if tensor.dtype == torch.bfloat16:  # here the factor itself may be rounded
            torch.testing.assert_close(tensor, other, rtol=2 * torch.finfo(tensor.dtype).eps, atol=1e-6)
        else:
            assert torch.equal(tensor, other)


def embedding_gradient(sparse: bool) -> Tensor:
    """The gradient of an embedding, one of whose rows was used twice."""
    embedding = torch.nn.Embedding(5, 3, sparse=sparse)
    embedding(torch.tensor([1, 3, 3])).sum().backward()
    return embedding.weight.grad


@pytest.mark.parametrize("factor", [0.5, torch.tensor(0.5, dtype=torch.float64)])
def test_sparse_gradients_are_multiplied(factor: float | Tensor) -> None:
    tensors = [embedding_gradient(sparse=True), torch.randn(3)]
    expected = [tensor.to_dense() * 0.5 for tensor in tensors]
    foreach.multiply_(tensors, factor)
    assert tensors[0].is_sparse
    assert_equal(expected, [tensor.to_dense() for tensor in tensors])


def test_copies_come_from_other_dtypes_and_layouts() -> None:
    tensors = [torch.zeros(2, 3), torch.zeros(3, 2).t(), torch.zeros(2)]
    others = [torch.arange(6.0).reshape(2, 3).double(), torch.arange(6.0).reshape(2, 3), torch.tensor(4.0).expand(2)]
    foreach.copy_(tensors, others)
    assert_equal([other.float().contiguous() for other in others], tensors)


@pytest.mark.parametrize("sparse", [(True, True), (False, True)])
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
