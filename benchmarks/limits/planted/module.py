"""A network whose parts take the time that its arguments say."""

import time
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn


class Net(LightningModule):
    """A perceptron. Sleeping stands for a device that computes while the processor is free.

    Args:
        width: Width of its layers.
        forward: Seconds of a forward besides the computation.
        per_sample: Seconds for each sample on the last process.
        hook: Seconds of a hook after each batch.
        ballast: Bytes of a buffer that each checkpoint holds.
        parameters: Number of parameters whose gradients cost nothing but their exchange.
        values: Number of values that each step logs.
        reads: Whether each step waits for the loss.
    """

    def __init__(
        self,
        *,
        width: int = 64,
        forward: float = 0.01,
        per_sample: float = 0.0,
        hook: float = 0.0,
        ballast: int = 1,
        parameters: int = 1,
        values: int = 1,
        reads: bool = False,
    ) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(16, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )
        self.register_buffer("ballast", torch.zeros(ballast, dtype=torch.uint8))
        self.table = nn.Parameter(torch.zeros(parameters))
        self.times = {"forward": forward, "per_sample": per_sample, "hook": hook}
        self.values = values
        self.reads = reads

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        wait(self.times["forward"])
        if self.global_rank == self.trainer.world_size - 1:
            wait(self.times["per_sample"] * len(batch))
        loss = self.net(batch).square().mean() + self.table.mean()
        for index in range(self.values):
            self.log(f"loss_{index}", loss.item() if self.reads else loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        wait(self.times["hook"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Validated(Net):
    """The same with validations.

    Args:
        validation: Seconds of a validation step.
        arguments: As for `Net`.
    """

    def __init__(self, *, validation: float = 0.0, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.times["validation"] = validation

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        wait(self.times["validation"])
        self.log("val_loss", self.net(batch).square().mean())


def wait(seconds: float) -> None:
    if seconds:
        time.sleep(seconds)
