"""Mistakes that a type checker finds: with `--strict`, a mistake that is not found is an error as well."""

import torch
from module import Classifier

import equipoise
from equipoise import (
    Callback,
    DDPStrategy,
    LightningModule,
    NoGradEvaluation,
    OutOfMemoryEvent,
    Strategy,
    Trainer,
    predict_memory,
)


class WrongHook(Callback):
    def on_train_start(self, trainer: Trainer) -> None:  # type: ignore[override]
        pass

    def on_out_of_memory(  # type: ignore[override]
        self, trainer: Trainer, pl_module: LightningModule, event: OutOfMemoryEvent
    ) -> str:
        return "two"


class WrongStrategy(Strategy):
    name = 3  # type: ignore[assignment]

    def connect(self, devices: str) -> None:  # type: ignore[override]
        pass

    @property
    def portable(self) -> list[torch.Tensor]:  # type: ignore[override]
        return []


def wrong_calls(trainer: Trainer, module: Classifier) -> None:
    Trainer(max_epochs="3")  # type: ignore[arg-type]
    Trainer(max_epoch=3)  # type: ignore[call-arg]
    Trainer(callbacks=[WrongStrategy()])  # type: ignore[list-item]
    Trainer(strategy=["ddp"])  # type: ignore[arg-type]
    DDPStrategy(backend=1)  # type: ignore[arg-type]
    NoGradEvaluation(3)  # type: ignore[arg-type]
    predict_memory(module)  # type: ignore[call-arg]
    trainer.fit()  # type: ignore[call-arg]
    print(trainer.global_stepp)  # type: ignore[attr-defined]
    print(equipoise.Trainr)  # type: ignore[attr-defined]
    epochs: str = trainer.current_epoch  # type: ignore[assignment]
    print(epochs)
