"""A program that trains, evaluates and predicts with classes of its own and of Equipoise."""

from pathlib import Path

import torch
from callback import Watcher
from halving_strategy import HalvingStrategy
from json_lines_logger import JSONLinesLogger
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from module import Classifier, Noise
from torch.utils.data import DataLoader

from equipoise import (
    CLITrainer,
    ConfigurationError,
    DDPStrategy,
    EvaluationResult,
    MemoryLogger,
    MemoryPrediction,
    NoGradEvaluation,
    OOMRecovery,
    PipelineStrategy,
    RunReport,
    Trainer,
    predict_memory,
)


def train(folder: Path) -> float:
    watcher = Watcher()
    checkpoints = ModelCheckpoint(monitor="val_loss")
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=HalvingStrategy(),
        precision="bf16-mixed",
        max_epochs=2,
        gradient_clip_val=1.0,
        callbacks=[watcher, checkpoints, OOMRecovery(), MemoryLogger(), RunReport()],
        logger=[JSONLinesLogger(folder), CSVLogger(folder)],
        default_root_dir=folder,
    )
    module = Classifier(lr=0.05)
    data = Noise()
    trainer.fit(module, datamodule=data)
    results = trainer.validate(module, data, ckpt_path="best")
    predictions = trainer.predict(module, DataLoader(data.data, batch_size=4))
    assert predictions is not None
    steps: int = trainer.global_step
    print(steps, checkpoints.best_model_path, watcher.losses, len(predictions))
    return float(results[0]["val_loss"])


def on_several_devices(loader: DataLoader[tuple[torch.Tensor, ...]]) -> None:
    try:
        Trainer(strategy=DDPStrategy(), devices=[0, 1]).fit(Classifier(), loader)
        Trainer(strategy=PipelineStrategy(), devices=["cpu", "cpu"]).fit(Classifier(), loader, loader)
        Trainer(strategy="auto", devices="auto", callbacks=Watcher()).test(Classifier(), loader)
    except ConfigurationError as error:
        print(error)


def evaluated(loader: DataLoader[tuple[torch.Tensor, ...]]) -> EvaluationResult | None:
    evaluation = NoGradEvaluation(loader, name="held_out", every_n_steps=10)
    Trainer(max_steps=20, callbacks=[evaluation]).fit(Classifier(), loader)
    return evaluation.results[-1] if evaluation.results else None


def predicted(loader: DataLoader[tuple[torch.Tensor, ...]]) -> MemoryPrediction:
    return predict_memory(Classifier(), loader, optimizer=torch.optim.AdamW)


def from_the_command_line() -> None:
    LightningCLI(Classifier, Noise, trainer_class=CLITrainer)
