"""Gradients of captured steps: hooks may change them, and what keeps them keeps what they were."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.simulated.captured.capturing import STAYS_EAGER, Graphs, assert_same, fit
from tests.support.step_networks import Apart, Halving, LoggingRate, Network, OfBatch, Replacing, Shared

REPLAYS = 13


# Changed


class WithoutOptimizer(Network):
    """No optimiser zeroes the gradients, which grow."""

    def configure_optimizers(self) -> Any:
        return None


@pytest.mark.filterwarnings("ignore:`configure_optimizers` returned None")
@pytest.mark.parametrize(
    ("make", "options", "replays"),
    [
        (Halving, {}, REPLAYS),
        (Halving, {"accumulate_grad_batches": 2}, 11),
        (Replacing, {}, REPLAYS),
        (OfBatch, {}, REPLAYS),
        *((make, {"gradient_clip_val": 0.05}, REPLAYS) for make in (Apart, Shared, WithoutOptimizer)),
    ],
)
def test_hooks_and_steps_see_the_gradients_of_eager_steps(
    make: type[Network], options: dict[str, Any], replays: int
) -> None:
    eager = fit(make, **options)
    captured = fit(make, capture=True, **options)
    assert_same(captured, eager)
    of_batches = [getattr(result.module, "gradients", []) for result in (captured, eager)]
    torch.testing.assert_close(*of_batches, rtol=0, atol=0)
    assert captured.replays >= replays


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


def test_a_step_that_reads_its_optimiser() -> None:
    """The compiler would set `capturable`, which rounds otherwise, before the first step of the optimiser."""
    options = {"accumulate_grad_batches": 4}
    eager = fit(LoggingRate, [5] * 12, **options)
    captured = fit(LoggingRate, [5] * 12, capture=True, **options)
    assert_same(captured, eager)
    assert captured.module.trainer.optimizers[0].param_groups[0]["capturable"] is False
    assert captured.replays >= 14
