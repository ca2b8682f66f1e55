"""Each step launches exactly so many operations on each device: one more fails.

On GPUs a small step takes as long as its launches, so an operation too many is time lost. A case says how many
operations each device launches in a step; where the steps of an accumulation window differ, how many in each of them.
An operation on a list of tensors counts once if CUDA has one kernel for the list, and otherwise once for each tensor.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from equipoise import BalancedDataParallelStrategy, DataParallelStrategy, OOMRecovery, PipelineStrategy, Strategy
from tests.simulated.devices.installation import extension
from tests.simulated.steps.launches import FIRST_STEPS, Launches, Operations, taken
from tests.support.pipelines import quiet

FEATURES, CLASSES, SAMPLES, STEPS = 6, 3, 8, 8
TWO = ("cuda:0", "cuda:1")


# Modules


class Mlp(L.LightningModule):
    """Four parameters, a loss, Adam."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def forward(self, features: Tensor) -> Any:
        return self.net(features)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class LoggingTensor(Mlp):
    """Logs its loss, as the value of a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


class LoggingMean(Mlp):
    """Logs its loss, as the value of a step and as a mean over the epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class LoggingNumber(Mlp):
    """Logs a number, as the value of a step and as a mean over the epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("number", float(batch_idx), on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)


# Counting


@pytest.fixture(autouse=True)
def nothing_recorded() -> Iterator[None]:
    yield
    extension().record_launches(False)
    extension().take_launches()


def batches() -> list[Any]:
    draw = torch.Generator().manual_seed(2)
    features = torch.randn(STEPS, SAMPLES, FEATURES, generator=draw)
    labels = torch.randint(CLASSES, (STEPS, SAMPLES), generator=draw)
    return list(zip(features, labels, strict=True))


# Cases


@dataclass(frozen=True)
class Case:
    """A fit, and the operations of its steps.

    Args:
        counts: Operations that cuda:0 and cuda:1 launch in a step; several such pairs for the steps of a window.
        strategy: Makes the strategy.
        devices: The devices.
        make: Makes the module.
        options: Further arguments of the Trainer.
    """

    counts: list[tuple[int, int]]
    strategy: Callable[[], Strategy | str] = lambda: "single_device"
    devices: tuple[str, ...] = ("cuda:0",)
    make: Callable[[], Mlp] = Mlp
    options: Callable[[], dict[str, Any]] = dict


def balanced() -> Strategy:
    return BalancedDataParallelStrategy(shares=[3, 1])


def forward() -> Strategy:
    return DataParallelStrategy(parallelize="forward")


def pipeline() -> Strategy:
    return PipelineStrategy(micro_batches=2, cut_before=["net.2"])


def clipped() -> dict[str, Any]:
    return {"gradient_clip_val": 0.1}


def accumulated() -> dict[str, Any]:
    return {"accumulate_grad_batches": 2}


def recovering() -> dict[str, Any]:
    return {"callbacks": [OOMRecovery()]}


# One operation more than the plain loop copies the loss, which callbacks receive. One less creates the gradient with
# which the backward begins. A logged value is copied, and a mean adds it to a sum. An accumulated step divides its
# loss.
CASES = {
    "single_device": Case([(23, 0)]),
    "single_device that logs a tensor": Case([(24, 0)], make=LoggingTensor),
    "single_device that logs a mean": Case([(25, 0)], make=LoggingMean),
    "single_device that logs a number": Case([(23, 0)], make=LoggingNumber),
    "single_device that clips": Case([(31, 0)], options=clipped),
    "single_device that accumulates": Case([(16, 0), (27, 0)], options=accumulated),
    "single_device that can recover": Case([(23, 0)], options=recovering),
    "single_device in 16-mixed": Case([(46, 0)], options=lambda: {"precision": "16-mixed"}),
    "dp": Case([(36, 22)], DataParallelStrategy, TWO),
    "dp that logs a mean": Case([(43, 23)], DataParallelStrategy, TWO, LoggingMean),
    "dp that clips": Case([(44, 22)], DataParallelStrategy, TWO, options=clipped),
    "dp that accumulates": Case([(29, 22), (40, 22)], DataParallelStrategy, TWO, options=accumulated),
    "dp of the forward": Case([(33, 16)], forward, TWO),
    "balanced": Case([(36, 22)], balanced, TWO),
    "pipeline": Case([(23, 36)], pipeline, TWO),
    "pipeline that logs a mean": Case([(23, 43)], pipeline, TWO, LoggingMean),
    "pipeline that clips": Case([(33, 39)], pipeline, TWO, options=clipped),
    "pipeline that accumulates": Case([(16, 29), (25, 38)], pipeline, TWO, options=accumulated),
}

# The same step written by hand.
BY_HAND = 23


# Tests


def launched_by_hand() -> Counter[str]:
    """Return the operations of a step of the plain loop, on cuda:0."""
    torch.manual_seed(1)
    module = Mlp().to("cuda:0")
    optimizer = module.configure_optimizers()
    extension().record_launches(True)
    for number, (features, labels) in enumerate(batches()):
        taken()
        loss = module.training_step((features.to("cuda:0"), labels.to("cuda:0")), number)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return taken()[0]


def launched(case: Case) -> list[Operations]:
    """Return the operations of all steps."""
    torch.manual_seed(1)
    launches = Launches()
    options = {"precision": "32-true", **case.options()}
    callbacks = [launches, *options.pop("callbacks", [])]
    trainer = quiet(
        accelerator="cuda",
        strategy=case.strategy(),
        devices=list(case.devices),
        callbacks=callbacks,
        **options,
    )
    trainer.fit(case.make(), DataLoader(batches(), batch_size=None))
    assert len(launches.of_steps) == STEPS
    return launches.of_steps


def test_the_plain_loop() -> None:
    operations = launched_by_hand()
    assert operations.total() == BY_HAND, listed(operations, Counter())


@pytest.mark.parametrize("name", CASES)
def test_operations_of_a_step(name: str) -> None:
    case = CASES[name]
    by_hand = launched_by_hand()
    window = len(case.counts)
    for number, operations in list(enumerate(launched(case)))[FIRST_STEPS:]:
        expected = case.counts[number % window]
        found = tuple(counts.total() for counts in operations)
        details = "\n".join(f"cuda:{index}: {listed(counts, by_hand)}" for index, counts in enumerate(operations))
        assert found == expected, f"step {number} launches {found} operations, not {expected}\n{details}"


def listed(operations: Counter[str], by_hand: Counter[str]) -> str:
    """Return the operations of a step as a list, each with the number of those in the plain loop."""
    names = sorted({*operations, *by_hand})
    return ", ".join(f"{name} {operations[name]} (by hand {by_hand[name]})" for name in names)
