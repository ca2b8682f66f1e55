"""One backward with its hooks, called directly."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from equipoise import StepError
from equipoise.trainer.optimization.steps.backward import Backward
from tests.support.contexts import training_context


class Weights(L.LightningModule):
    """Two weights, and the loss weight · (3, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Any: ...

    def loss(self) -> Tensor:
        return self.weight @ GRADIENT


GRADIENT = torch.tensor([3.0, 5.0], dtype=torch.float64)


class Hooked(Weights):
    """Notes what the hooks see."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, Any]] = []

    def on_before_backward(self, loss: Tensor) -> None:
        self.seen.append(("before", loss.tolist()))
        assert self.weight.grad is None

    def on_after_backward(self) -> None:
        assert self.weight.grad is not None
        self.seen.append(("after", self.weight.grad[0].item()))


def backward_of(module: Weights, scaler: GradScaler | None = None) -> Backward:
    context = training_context(module)
    context.precision.scaler = scaler
    return Backward(context)


class TestShare:
    @pytest.mark.parametrize("kind", [Weights, Hooked])
    @pytest.mark.parametrize(
        "share", [None, 0.5, 1 / 3, torch.tensor(0.3, dtype=torch.float64)], ids=["none", "half", "third", "tensor"]
    )
    def test_it_multiplies_the_gradient(self, kind: type[Weights], share: Any) -> None:
        module = kind()
        backward_of(module)(module.loss(), share, 3)
        factor = 1.0 if share is None else float(share)
        torch.testing.assert_close(module.weight.grad, factor * GRADIENT, rtol=1e-15, atol=0)

    def test_an_even_share_has_the_bits_of_a_division(self) -> None:
        module, expected = Weights(), Weights()
        with torch.no_grad():
            for each in (module, expected):
                each.weight.mul_(1 / 7)
        backward_of(module)(module.loss().square(), 1 / 3, 3)
        (expected.loss().square() / 3).backward()
        assert torch.equal(module.weight.grad, expected.weight.grad)  # type: ignore[arg-type]

    def test_shares_follow_each_other_in_any_order(self) -> None:
        module = Weights()
        backward = backward_of(module)
        shares = [0.5, 0.25, 0.5, None, 0.25, 2.0]
        for share in shares:
            backward(module.loss(), share, 2)
        total = sum(1.0 if share is None else share for share in shares)
        torch.testing.assert_close(module.weight.grad, total * GRADIENT, rtol=1e-15, atol=0)


class TestManual:
    def test_a_loss_that_is_no_tensor_is_refused(self) -> None:
        with pytest.raises(StepError, match=r"takes the loss as a tensor, not 3\.0 of type float"):
            backward_of(Weights()).manual(3.0)  # type: ignore[arg-type]


class TestErrors:
    @pytest.mark.parametrize("kind", [Weights, Hooked])
    @pytest.mark.parametrize("share", [None, 0.5])
    def test_a_loss_with_several_elements_is_named(self, kind: type[Weights], share: float | None) -> None:
        module = kind()
        with pytest.raises(StepError, match=r"must be a scalar, but is of shape \[2\]"):
            backward_of(module)(2 * module.weight, share, 2)

    def test_a_loss_without_a_graph_is_named(self) -> None:
        module = Weights()
        with pytest.raises(StepError, match="not connected to any parameter"):
            backward_of(module)(module.loss().detach())

    def test_a_graph_that_was_used_before_gets_a_note(self) -> None:
        module = Weights()
        backward = backward_of(module)
        loss = module.loss().square()
        backward(loss)
        with pytest.raises(RuntimeError) as caught:
            backward(loss)
        assert "still has its graph" in caught.value.__notes__[0]


@pytest.mark.parametrize("share", [None, 0.5])
def test_a_hook_that_changes_the_first_gradient_does_not_change_later_steps(share: float | None) -> None:
    module = Weights()
    backward = backward_of(module)
    factor = 1.0 if share is None else share
    for _ in range(2):
        loss = module.loss()
        loss.register_hook(lambda gradient: gradient.mul_(2))
        backward(loss, share, 2)
    assert torch.equal(module.weight.grad, 4 * factor * GRADIENT)
    module.weight.grad = None
    backward(module.loss(), share, 2)
    assert torch.equal(module.weight.grad, factor * GRADIENT)


def test_losses_of_several_dtypes_follow_one_another() -> None:
    module = Weights()
    backward = backward_of(module)
    for dtype in (torch.float64, torch.float32, torch.float64, torch.bfloat16):
        backward(module.loss().to(dtype))
    assert torch.equal(module.weight.grad, 4 * GRADIENT)


def test_a_complex_loss_is_an_error() -> None:
    module = Weights()
    with pytest.raises(RuntimeError, match="real scalar outputs"):
        backward_of(module)(module.loss().to(torch.complex128))
