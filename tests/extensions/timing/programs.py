"""Programs whose time passes by a clock that the tests set."""

from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from equipoise import Callback, StepTimes
from tests.support.callback_runs import Clock
from tests.support.trainer_runs import trainer

STEPS = 24
FIRST = 3


class TickingData(Dataset[Tensor]):
    """Samples of which each takes a time."""

    def __init__(self, clock: Clock, seconds: float = 0.0, samples: int = STEPS) -> None:
        self.clock = clock
        self.seconds = seconds
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        self.clock.tick(self.seconds)
        return torch.tensor([float(index), 1.0], dtype=torch.float64)


class Ticking(L.LightningModule):
    """A linear layer whose forward, backward, optimiser step and validation take times that are powers of two.

    Args:
        clock: The clock.
        forward: Seconds of a forward.
        backward: Seconds of a backward.
        step: Seconds of an optimiser's step.
        validation: Seconds of a validation step.
    """

    def __init__(
        self, clock: Clock, *, forward: float = 1.0, backward: float = 2.0, step: float = 0.5, validation: float = 0.0
    ) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1, dtype=torch.float64)
        self.clock = clock
        self.seconds = {"forward": forward, "backward": backward, "step": step, "validation": validation}

    def tick(self, name: str) -> None:
        self.clock.tick(self.seconds[name])

    def loss(self, batch: Any) -> Tensor:
        self.tick("forward")
        loss = self.layer(batch).square().mean()
        loss.register_hook(lambda gradient: self.tick("backward"))
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.0)
        optimizer.register_step_pre_hook(lambda *args: self.tick("step"))
        return optimizer


class Validated(Ticking):
    """The same with validations."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.tick("validation")
        self.log("val_loss", self.layer(batch).square().mean())


class Slow(Callback):
    """A callback that takes a time after some batches, and before optimiser steps.

    Args:
        clock: The clock.
        seconds: Seconds after a batch.
        every: Number of batches from one to the next.
        before_step: Seconds before an optimiser's step.
    """

    def __init__(self, clock: Clock, seconds: float, every: int = 1, before_step: float = 0.0) -> None:
        self.clock = clock
        self.seconds = seconds
        self.every = every
        self.before_step = before_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.every == 0:
            self.clock.tick(self.seconds)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.clock.tick(self.before_step)


def loader(clock: Clock, seconds: float = 0.0, samples: int = STEPS, **options: Any) -> DataLoader[Tensor]:
    return DataLoader(TickingData(clock, seconds, samples), **{"batch_size": 1, **options})


def fit(
    module: L.LightningModule, train: Any, val: Any = None, *, callbacks: Any = (), log: bool = False, **options: Any
) -> tuple[StepTimes, Any]:
    """Return the callback after a fit, and the trainer."""
    times = StepTimes(log=log)
    run = trainer(callbacks=[*callbacks, times], **{"num_sanity_val_steps": 0, **options})
    run.fit(module, train, val)
    return times, run
