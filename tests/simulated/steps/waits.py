"""The reasons for which the host waits in the steps of a fit."""

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from equipoise import (
    BalancedDataParallelStrategy,
    DataParallelStrategy,
    PipelineStrategy,
    Strategy,
)
from tests.simulated.devices.installation import extension
from tests.support.batches import Batches
from tests.support.networks.transparency import Mlp
from tests.support.pipelines import quiet

__all__ = ["EPOCHS", "SIZES", "STRATEGIES", "Logging", "Reasons", "reasons_of"]


SIZES = [13] * 4


EPOCHS = 2


class Logging(Mlp):
    """Logs its loss, and a number."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.log("logged", output["loss"] if isinstance(output, dict) else output, prog_bar=True, on_epoch=True)
        self.log("number", float(batch_idx), on_epoch=True)
        return output


class Reasons(L.Callback):
    """Notes for which reasons the host waits, from the end of one batch to that of the next."""

    def __init__(self) -> None:
        self.of_steps: list[list[str]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            # What an epoch begins with belongs to no step.
            extension().take_reasons()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.of_steps.append(extension().take_reasons())


def reasons_of(
    make: Callable[[], L.LightningModule], strategy: Strategy | str, devices: list[str], **options: Any
) -> list[list[str]]:
    """Return the reasons to wait in each step of two epochs."""
    torch.manual_seed(1)
    reasons = Reasons()
    callbacks = [*options.pop("callbacks", []), reasons]
    trainer = quiet(
        **{
            "accelerator": "cuda",
            "strategy": strategy,
            "devices": devices,
            "max_epochs": EPOCHS,
            "callbacks": callbacks,
            "precision": "32-true",
            **options,
        }
    )
    trainer.fit(make(), DataLoader(Batches(SIZES), batch_size=None, pin_memory=True))
    assert len(reasons.of_steps) == EPOCHS * len(SIZES)
    return reasons.of_steps


STRATEGIES: dict[str, tuple[Callable[[], Strategy | str], list[str]]] = {
    "single_device": (lambda: "single_device", ["cuda:1"]),
    "dp": (DataParallelStrategy, ["cuda:0", "cuda:1"]),
    "dp forward": (lambda: DataParallelStrategy(parallelize="forward"), ["cuda:0", "cuda:1"]),
    "dp on one device": (DataParallelStrategy, ["cuda:1", "cuda:1"]),
    "balanced": (lambda: BalancedDataParallelStrategy(shares=[2, 1]), ["cuda:1", "cuda:0"]),
    "pipeline": (lambda: PipelineStrategy(micro_batches=2), ["cuda:0", "cuda:1"]),
    "pipeline on one device": (lambda: PipelineStrategy(micro_batches=2), ["cuda:1", "cuda:1"]),
    "pipeline with several stages on a device": (
        lambda: PipelineStrategy(micro_batches=2, schedule="interleaved_zero_bubble", stages_per_device=2),
        ["cuda:0", "cuda:1"],
    ),
}
