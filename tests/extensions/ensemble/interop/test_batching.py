"""The steps of `vmap` without its nested structures have the results of `torch.vmap`."""

import pytest
import torch
from torch import Tensor

from equipoise.extensions.ensemble.interop.batching import batched_linear, compute_batched


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


LINEAR = torch.nn.functional.linear


def product(features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    result = features @ weight.mT
    return result if bias is None else result + bias


def linear_of_rows(function: object, features: Tensor, dim: int | None, *, has_bias: bool) -> list[Tensor]:
    """Outputs and gradients of a linear layer of three rows."""
    draw = torch.Generator().manual_seed(1)
    weights = torch.randn(3, 5, 4, dtype=torch.float64, generator=draw).requires_grad_()
    biases = torch.randn(3, 5, dtype=torch.float64, generator=draw).requires_grad_()
    leaves = [features.detach().requires_grad_(), weights, *([biases] if has_bias else [])]

    def compute(tensors: list[Tensor]) -> list[Tensor]:
        bias = tensors[2] if has_bias else None
        return [function(tensors[0], tensors[1], bias)]  # type: ignore[operator]

    (result,) = compute_batched(compute, leaves, (dim, 0, 0)[: len(leaves)], 3, "error")
    return [result, *torch.autograd.grad(result.sin().sum(), leaves)]


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(
    ("shape", "dim"), [((3, 6, 4), 0), ((6, 3, 4), 1), ((6, 4), None), ((3, 4), 0), ((3, 2, 6, 4), 0)], ids=str
)
def test_a_linear_layer_of_rows_is_one_product(shape: tuple[int, ...], dim: int | None, has_bias: bool) -> None:
    """Those of other shapes are left to torch."""
    features = torch.randn(shape, dtype=torch.float64)
    computed = linear_of_rows(LINEAR, features, dim, has_bias=has_bias)
    expected = linear_of_rows(product, features, dim, has_bias=has_bias)
    for tensor, other in zip(computed, expected, strict=True):
        torch.testing.assert_close(tensor, other, rtol=1e-12, atol=1e-12)
    assert computed[0].grad_fn is not None
    is_one = computed[0].grad_fn.name() == ("BaddbmmBackward0" if has_bias else "BmmBackward0")
    assert is_one == (shape not in ((3, 4), (3, 2, 6, 4)))


def test_a_linear_layer_within_other_transforms_is_left_to_torch() -> None:
    def twice(features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        inner = torch.vmap(lambda rows: LINEAR(rows, weight, bias))(torch.stack([features, 2 * features]))
        slope = torch.func.grad(lambda rows: LINEAR(rows, weight, bias).square().sum())(features)
        return inner.sum() + slope.sum()

    def expected(features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        inner = product(torch.stack([features, 2 * features]), weight, bias)
        slope = 2 * product(features, weight, bias) @ weight
        return inner.sum() + slope.sum()

    features = torch.randn(3, 6, 4, dtype=torch.float64)
    for tensor, other in zip(
        linear_of_rows(twice, features, 0, has_bias=True),
        linear_of_rows(expected, features, 0, has_bias=True),
        strict=True,
    ):
        torch.testing.assert_close(tensor, other, rtol=1e-10, atol=1e-10)


def test_a_linear_layer_without_rows_is_left_to_torch() -> None:
    features, weight = torch.randn(6, 4), torch.randn(5, 4)
    assert torch.equal(batched_linear(features, weight, None), LINEAR(features, weight))
