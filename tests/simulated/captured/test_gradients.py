"""Gradients of captured steps: hooks may change them, and what keeps them keeps what they were."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import ignoring
from tests.simulated.captured.capturing import FEATURES, STAYS_EAGER, Graphs, Network, assert_same, fit

pytestmark = ignoring("The '\\w+' does not have many workers")

REPLAYS = 13


# Changed


class Halving(Network):
    """Changes gradients in place, and logs one."""

    def on_after_backward(self) -> None:
        self.log("norm", self.net[0].weight.grad.norm())
        for parameter in self.parameters():
            parameter.grad.mul_(0.5)


class Replacing(Network):
    """Replaces gradients, and removes one."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            parameter.grad = parameter.grad * 0.5
        self.net[0].bias.grad = None


@pytest.mark.parametrize(
    ("make", "window", "replays"), [(Halving, 1, REPLAYS), (Halving, 2, 11), (Replacing, 1, REPLAYS)]
)
def test_a_hook_changes_them(make: type[Network], window: int, replays: int) -> None:
    eager = fit(make, accumulate_grad_batches=window)
    captured = fit(make, accumulate_grad_batches=window, capture=True)
    assert_same(captured, eager)
    assert captured.replays >= replays


class Apart(Network):
    """The optimiser has not all parameters: gradients of the others are never zeroed."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(FEATURES, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        return {"loss": result["loss"] * self.other(batch[0]).square().mean()}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), 0.1)


class Shared(Network):
    """Two parameters whose gradients are one tensor, clipped in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(2))
        self.second = nn.Parameter(torch.ones(2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        return {"loss": result["loss"] + (self.first + self.second).sum()}


class WithoutOptimizer(Network):
    """No optimiser zeroes the gradients, which grow."""

    def configure_optimizers(self) -> Any:
        return None


@pytest.mark.filterwarnings("ignore:`configure_optimizers` returned None")
@pytest.mark.parametrize("make", [Apart, Shared, WithoutOptimizer])
def test_other_gradients(make: type[Network]) -> None:
    options = {"gradient_clip_val": 0.05}
    eager = fit(make, **options)
    captured = fit(make, capture=True, **options)
    assert_same(captured, eager)
    assert captured.replays >= REPLAYS


class OfBatch(Network):
    """The batch receives a gradient, too."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients: list[Tensor] = []

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0].requires_grad_(), batch[1]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.gradients.append(batch[0].grad)


def test_the_gradient_of_a_batch() -> None:
    eager = fit(OfBatch)
    captured = fit(OfBatch, capture=True)
    assert_same(captured, eager)
    torch.testing.assert_close(captured.module.gradients, eager.module.gradients, rtol=0, atol=0)
    assert captured.replays >= REPLAYS


# Kept


class Keeping(Network):
    """Keeps gradients as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.kept.append(self.net[0].weight.grad)


class KeepingView(Keeping):
    """Keeps a part of a gradient."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.kept.append(self.net[0].weight.grad.detach()[0])


class TwoSteps(torch.optim.SGD):
    """Adds a part of the last step's gradients, which it keeps as they are."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                last = self.state[parameter].get("last")
                with torch.no_grad():
                    parameter.sub_(parameter.grad, alpha=0.1)
                    if last is not None:
                        parameter.sub_(last, alpha=0.05)
                self.state[parameter]["last"] = parameter.grad
        return loss


class KeepingOptimizer(Keeping):
    """Its optimiser keeps the gradients."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return TwoSteps(self.parameters(), 0.1)


@pytest.mark.parametrize("make", [Keeping, KeepingView, KeepingOptimizer])
def test_kept_gradients_stay_as_they_are(make: type[Keeping]) -> None:
    sizes = [5] * 24
    eager = fit(make, sizes)
    graphs = Graphs()
    with pytest.warns(UserWarning, match=f"{STAYS_EAGER} gradients of an earlier step are still in use"):
        captured = fit(make, sizes, capture=True, callbacks=[graphs])
    assert_same(captured, eager)
    torch.testing.assert_close(captured.module.kept, eager.module.kept, rtol=0, atol=0)
    # Each trial has a graph, which is released when no further one follows.
    assert max(graphs.more) == 1
    assert graphs.more[-1] == 0


# The optimiser


class LoggingRate(Network):
    """Logs the learning rate."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("rate", self.optimizers().param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01)


def test_a_step_that_reads_its_optimiser() -> None:
    """The compiler would set `capturable`, which rounds otherwise, before the first step of the optimiser."""
    options = {"accumulate_grad_batches": 4}
    eager = fit(LoggingRate, [5] * 12, **options)
    captured = fit(LoggingRate, [5] * 12, capture=True, **options)
    assert_same(captured, eager)
    assert captured.module.trainer.optimizers[0].param_groups[0]["capturable"] is False
    assert captured.replays >= 14
