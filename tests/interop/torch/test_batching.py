"""The steps of `vmap` without its nested structures have the results of `torch.vmap`."""

import pytest
import torch
from torch import Tensor

from equipoise.interop.torch.batching import compute_batched


def test_results_and_gradients_are_those_of_vmap() -> None:
    torch.manual_seed(0)
    weights = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    inputs = torch.randn(5, 4, dtype=torch.float64)

    def compute(weight: Tensor, features: Tensor) -> Tensor:
        return (features @ weight).relu()

    (result,) = compute_batched(lambda tensors: [compute(*tensors)], [weights, inputs], (0, None), 3, "error")
    expected = torch.vmap(compute, in_dims=(0, None))(weights, inputs)
    assert torch.equal(result, expected)
    (gradient,) = torch.autograd.grad(result.square().sum(), weights)
    (expected_gradient,) = torch.autograd.grad(expected.square().sum(), weights)
    assert torch.equal(gradient, expected_gradient)


def test_a_result_that_no_row_changes_is_repeated() -> None:
    (result,) = compute_batched(lambda tensors: [tensors[1]], [torch.ones(3), torch.zeros(2)], (0, None), 3, "error")
    assert result.shape == (3, 2)


def test_random_numbers() -> None:
    def draw(randomness: str) -> Tensor:
        (result,) = compute_batched(
            lambda tensors: [torch.dropout(tensors[0], 0.5, True)], [torch.ones(4, 64)], (0,), 4, randomness
        )
        return result

    with pytest.raises(RuntimeError, match="randomness error mode"):
        draw("error")
    rows = draw("different").unbind()
    assert not torch.equal(rows[0], rows[1])


def test_an_error_leaves_no_level_behind() -> None:
    def fail(tensors: object) -> list[Tensor]:
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        compute_batched(fail, [torch.ones(2)], (0,), 2, "error")
    assert torch.equal(torch.vmap(torch.neg)(torch.ones(2)), -torch.ones(2))
