"""Gradients that hooks of the module read and change are those of one device."""

import warnings
from functools import cache
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from equipoise import DDPStrategy, FSDPStrategy, PipelineStrategy, StepError
from tests.support.equality import assert_equal
from tests.support.pipelines import quiet


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)).double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.net(batch[0]) * 3).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Clamps(Net):
    """Limits each element after the backward."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            parameter.grad.clamp_(-0.05, 0.05)


class LeavesOutSpikes(Net):
    """Decides after the backward whether the optimiser steps."""

    def __init__(self) -> None:
        super().__init__()
        self.is_large = False

    def on_after_backward(self) -> None:
        self.is_large = any(bool((parameter.grad.abs() > 2.5).any()) for parameter in self.parameters())

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        closure()
        if not self.all_gather(torch.tensor(self.is_large)).any():
            optimizer.step()


class ClipsItself(Net):
    """Clips by a norm of its own before the optimiser's step."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        closure()
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.2)
        optimizer.step()


class Decides(Net):
    """Reads numbers of whole gradients, and changes gradients by them."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [parameter.grad for parameter in self.parameters()]
        norm = sum(float(gradient.square().sum()) for gradient in gradients) ** 0.5
        norm += max(torch.linalg.norm(gradient).item() for gradient in gradients)
        norm += float(torch.nn.utils.get_total_norm(gradients)) + int((gradients[0] > 0).sum())
        for gradient in gradients:
            if (gradient > 0.3).any():
                gradient.mul_(0.5 / norm)


PROGRAMS = (Clamps, ClipsItself, LeavesOutSpikes, Decides)


def weights(kind: type[Net], strategy: Any = "single_device", devices: int = 1, **settings: Any) -> list[torch.Tensor]:
    module = kind()
    draw = torch.Generator().manual_seed(5)
    # The last batch is smaller, also by process.
    data = TensorDataset(torch.randn(22, 4, generator=draw, dtype=torch.float64))
    is_divided = not isinstance(strategy, str | PipelineStrategy)
    trainer = quiet(strategy=strategy, devices=["cpu"] * devices, max_epochs=2, **settings)
    trainer.fit(module, DataLoader(data, batch_size=8 // devices if is_divided else 8))
    return [parameter.detach() for parameter in module.parameters()]


@cache
def on_one_device(kind: type[Net]) -> list[torch.Tensor]:
    return weights(kind)


STRATEGIES = {
    "ddp": lambda: DDPStrategy(engine="torch"),
    "native": lambda: DDPStrategy(engine="native"),
    "fsdp": FSDPStrategy,
    "pipeline": lambda: PipelineStrategy(micro_batches=2),
}


CASES = [
    *(("fsdp", kind) for kind in PROGRAMS),  # which has gradients in shards
    *(("ddp", Clamps), ("ddp", Decides), ("native", LeavesOutSpikes), ("native", ClipsItself)),
    *(("pipeline", Decides), ("pipeline", LeavesOutSpikes)),
]


@pytest.mark.quick_cases(6)
@pytest.mark.thorough
@pytest.mark.parametrize(("strategy", "kind"), CASES)
def test_gradients_in_hooks_are_those_of_one_device(strategy: str, kind: type[Net]) -> None:
    assert_equal(on_one_device(kind), weights(kind, STRATEGIES[strategy](), 2), 1e-12)


def test_some_steps_are_left_out() -> None:
    for other in (weights(Net), list(Net().parameters())):
        assert not torch.equal(on_one_device(LeavesOutSpikes)[0], other[0])


class ClampsData(Net):
    """Limits each element past what torch counts."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            parameter.grad.data.clamp_(-0.05, 0.05)


class Replaces(Net):
    """Puts other gradients in their place."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            parameter.grad = parameter.grad.clamp(-0.05, 0.05)


class ClipsInBackward(Net):
    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.2)


class Reads(Net):
    def on_after_backward(self) -> None:
        self.norms = [float(parameter.grad.norm()) for parameter in self.parameters()]


@pytest.mark.quick_cases(3)
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        *(("ddp", Clamps), ("native", ClampsData), ("fsdp", Reads), ("native", Replaces), ("fsdp", ClipsInBackward)),
        *(("ddp", Reads), ("fsdp", ClampsData), ("ddp", Replaces)),
    ],
)
def test_gradients_that_are_not_those_of_all_processes_are_read_only(strategy: str, kind: type[Net]) -> None:
    def fit(strategy: Any, devices: int) -> list[torch.Tensor]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*reads gradients that are not yet those of all processes")
            return weights(kind, strategy, devices, accumulate_grad_batches=2)

    expected = fit("single_device", 1)
    if kind is Reads:
        assert_equal(expected, fit(STRATEGIES[strategy](), 2), 1e-12)
    else:
        with pytest.raises(StepError, match="changes gradients that are not yet those of all processes"):
            fit(STRATEGIES[strategy](), 2)
