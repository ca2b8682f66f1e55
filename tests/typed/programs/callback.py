"""A callback that overrides hooks of Lightning and of Equipoise."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from equipoise import Callback, LightningModule, OutOfMemoryEvent, Split, Trainer


class Watcher(Callback):
    fires_without_batch = True

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.print(f"{trainer.max_epochs} epochs on {trainer.world_size} processes")

    def on_before_batch_to_device(self, trainer: Trainer, pl_module: LightningModule, batch_idx: int) -> None:
        if batch_idx == 100:
            trainer.should_stop = True

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Tensor | Mapping[str, Any] | None,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if isinstance(outputs, Mapping) and outputs:
            self.losses.append(float(outputs["loss"]))

    def on_out_of_memory(
        self, trainer: Trainer, pl_module: LightningModule, event: OutOfMemoryEvent
    ) -> int | Split | None:
        return 2 if event.can_repeat else None

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.losses = state_dict["losses"]
