"""Every precision trains on a GPU, near float64 on the CPU; steps whose gradients overflow are left out."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from tests.gpu.runs import CPU, Classifier, fit, weights
from tests.support.networks.normalised import NAMES


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Adam divides by numbers that are too small for float16."""
    return torch.optim.SGD(parameters, lr=0.1)


class Losses(Callback):
    """Notes the loss of each step."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(outputs["loss"].detach().double().cpu())


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("strategy", "parts"), [("single_device", 1), ("dp", 2), ("pipeline", 2)])
def test_every_precision_of_a_trainer(strategy: str, parts: int, name: str) -> None:
    expected, losses = Losses(), Losses()
    fit(lambda: Classifier(sgd), CPU, callbacks=[expected])
    fit(lambda: Classifier(sgd), strategy=strategy, parts=parts, callbacks=[losses], precision=name)
    torch.testing.assert_close(torch.stack(losses.seen), torch.stack(expected.seen), rtol=0.1, atol=0.05)


# Overflow


class Overflowing(Classifier):
    """In one step the scaled loss has gradients beyond float16."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2 and self.current_epoch == 0:
            return loss * torch.inf
        return loss


class Steps(Callback):
    """Notes the weights after each batch, and the scale of the loss."""

    def __init__(self) -> None:
        self.weights: list[list[Tensor]] = []
        self.scales: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.weights.append(weights(module))
        self.scales.append(trainer.precision_plugin.scaler.get_scale())


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("optimizer", [None, fused], ids=["foreach", "fused"])
@pytest.mark.parametrize(("strategy", "parts"), [("single_device", 1), ("dp", 2), ("pipeline", 2)])
def test_a_step_that_overflows_is_left_out(strategy: str, parts: int, optimizer: Any) -> None:
    steps = Steps()
    fit(
        lambda: Overflowing(optimizer),
        strategy=strategy,
        parts=parts,
        callbacks=[steps],
        precision="16-mixed",
    )
    changed = [
        any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
        for before, after in zip(steps.weights, steps.weights[1:], strict=False)
    ]
    assert changed == [True, False, True, True, True, True, True]
    assert steps.scales[2] == steps.scales[1] / 2
    assert all(parameter.isfinite().all() for parameter in steps.weights[-1])
