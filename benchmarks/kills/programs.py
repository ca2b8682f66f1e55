"""Random training programs, small enough to be killed often, and what is compared of them."""

import json
import logging
import os
import random
import signal
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from equipoise import DDPStrategy, PipelineStrategy, Trainer

__all__ = ["IN_PROCESSES", "MODES", "Case", "Kill", "draw", "train"]

MODES = ("single", "persistent", "ddp", "uneven", "pipeline", "replicas")
IN_PROCESSES = ("ddp", "uneven", "pipeline", "replicas")
FEATURES, CLASSES = 5, 3


@dataclass(frozen=True)
class Case:
    """A program, drawn by its number.

    Attributes:
        seed: The number.
        mode: One of `MODES`.
        samples, batch_size, epochs, max_steps: The size; `max_steps` is -1 for none.
        workers: Worker processes of each loader; they persist in the mode "persistent".
        loaders: "one", "two" that are read together, "unsized", or "split" into unequal parts by the processes.
        noise: Whether samples are distorted anew whenever they are read.
        dropout, norm: Layers of the network.
        precision, accumulate, clip: Arguments of the trainer.
        schedule: "none", "step", "epoch" or "plateau".
        validation: The `val_check_interval`; None for no validation.
        sanity_steps: Batches of the check before training.
        log_every: Steps between two rows.
        every_n_steps: Steps between two checkpoints; None: at the end of each epoch or validation.
        top_k: How many of the best checkpoints a second callback keeps; None for no second callback.
        early_stopping: The patience; None for no such callback.
        average: Whether an exponential average of the weights is kept.
    """

    seed: int
    mode: str
    samples: int
    batch_size: int
    epochs: int
    max_steps: int
    workers: int
    loaders: str
    noise: bool
    dropout: float
    norm: bool
    precision: str
    accumulate: int
    clip: float | None
    schedule: str
    validation: float | int | None
    sanity_steps: int
    log_every: int
    every_n_steps: int | None
    top_k: int | None
    early_stopping: int | None
    average: bool


def draw(seed: int, mode: str) -> Case:
    """The program of a number."""
    choose = random.Random(f"{mode} {seed}")
    in_process = mode in ("single", "persistent")
    loaders = choose.choice(["one", "one", "two", "unsized"] if mode == "single" else ["one", "one", "two"])
    if mode in IN_PROCESSES:
        loaders = "split" if mode == "uneven" else "one"
    workers = {"single": choose.choice([0, 0, 1]), "persistent": choose.choice([1, 1, 2])}.get(mode, 0)
    batch_size = choose.choice([2, 4])
    batches = choose.randint(3, 7)
    return Case(
        seed=seed,
        mode=mode,
        samples=batches * batch_size - (choose.choice([0, 1]) if batch_size > 2 else 0),  # no batch of one
        batch_size=batch_size,
        epochs=choose.choice([2, 3]),
        max_steps=choose.choice([-1, -1, -1, batches + 2]),
        workers=0 if loaders == "unsized" else workers,
        loaders=loaders,
        noise=mode == "single" and choose.random() < 0.5,
        dropout=choose.choice([0.0, 0.3]),
        norm=in_process and choose.random() < 0.4,
        precision=choose.choice(["32-true", "64-true", "bf16-mixed", "16-mixed"] if in_process else ["64-true"]),
        accumulate=choose.choice([1, 1, 2, 3]),
        clip=choose.choice([None, 1.0]),
        schedule=choose.choice(["none", "step", "epoch", "plateau"]),
        validation=choose.choice([None, 1.0, 1.0, 2] if loaders != "unsized" else [None, 1.0, 2]),
        sanity_steps=choose.choice([0, 1]),
        log_every=choose.choice([1, 2]),
        every_n_steps=choose.choice([None, 1, 2, 3]),
        top_k=choose.choice([None, 1, 2]),
        early_stopping=choose.choice([None, None, 1]),
        average=in_process and choose.random() < 0.3,
    )


# Data


class Samples(Dataset[tuple[Tensor, Tensor, int]]):
    """Random samples.

    Args:
        case: The program.
        offset: What is added to the indices, to tell several data sets apart.
    """

    def __init__(self, case: Case, offset: int = 0) -> None:
        generator = torch.Generator().manual_seed(case.seed)
        self.features = torch.randn(case.samples, FEATURES, generator=generator)
        self.labels = torch.randint(0, CLASSES, (case.samples,), generator=generator)
        self.noise = case.noise
        self.offset = offset

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        features = self.features[index]
        if self.noise:
            features = features + 0.1 * torch.randn(FEATURES) + 0.01 * random.random()
        return features, self.labels[index], index + self.offset


class Unsized(IterableDataset[tuple[Tensor, Tensor, int]]):
    """The same in an order of its own, without length."""

    def __init__(self, case: Case) -> None:
        self.samples = Samples(case)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        order = torch.randperm(len(self.samples)).tolist()
        return (self.samples[index] for index in order)


class Split(IterableDataset[tuple[Tensor, Tensor, int]]):
    """The samples in two unequal parts, one for each process."""

    def __init__(self, case: Case) -> None:
        self.samples = Samples(case)
        self.border = random.Random(case.seed).randint(0, case.samples)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        parts = (range(self.border), range(self.border, len(self.samples)))
        return (self.samples[index] for index in parts[torch.distributed.get_rank()])


def _loader(case: Case, offset: int = 0, *, shuffle: bool = True) -> DataLoader[Any]:
    persistent = case.mode == "persistent"
    return DataLoader(
        Samples(case, offset),
        batch_size=case.batch_size,
        shuffle=shuffle,
        num_workers=case.workers,
        persistent_workers=persistent,
    )


def _loaders(case: Case) -> tuple[Any, Any]:
    val = None if case.validation is None else _loader(case, shuffle=False)
    if case.loaders == "unsized":
        return DataLoader(Unsized(case), batch_size=case.batch_size), val
    if case.loaders == "split":
        return DataLoader(Split(case), batch_size=case.batch_size), val
    if case.loaders == "two":
        return [_loader(case), _loader(case, 1000)], val
    return _loader(case), val


def _parts_of(batch: Any) -> list[Any]:
    """The batches of the loaders that are read together."""
    return list(batch) if isinstance(batch[0], list | tuple) else [batch]


# The module


class Module(LightningModule):
    """A perceptron that notes every batch in a file, which outlives its process.

    Args:
        case: The program.
        folder: Where the notes go.
    """

    def __init__(self, case: Case, folder: Path) -> None:
        super().__init__()
        self.case = case
        self.folder = folder
        layers = [nn.Linear(FEATURES, 6), nn.BatchNorm1d(6) if case.norm else nn.Identity(), nn.Tanh()]
        self.net = nn.Sequential(*layers, nn.Dropout(case.dropout), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, CLASSES))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        indices = [part[2].tolist() for part in _parts_of(batch)]
        note = json.dumps([self.trainer.current_epoch, batch_idx, indices])
        with (self.folder / f"seen-{self.trainer.global_rank}.jsonl").open("a") as file:
            file.write(note + "\n")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = _parts_of(batch)
        features = torch.cat([part[0] for part in parts]).to(self.net[0].weight.dtype)
        loss = nn.functional.cross_entropy(self.net(features), torch.cat([part[1] for part in parts]))
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        features, labels, _ = batch
        logits = self.net(features.to(self.net[0].weight.dtype))
        self.log(
            "val_loss", nn.functional.cross_entropy(logits, labels), on_step=self.case.seed % 3 == 0, on_epoch=True
        )

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        schedules = torch.optim.lr_scheduler
        match self.case.schedule:
            case "step":
                return [optimizer], [{"scheduler": schedules.StepLR(optimizer, 2, 0.9), "interval": "step"}]
            case "epoch":
                return [optimizer], [schedules.ExponentialLR(optimizer, 0.8)]
            case "plateau":
                plateau = schedules.ReduceLROnPlateau(optimizer, patience=0, threshold=0.1)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "loss_epoch"}}
        return optimizer


# Killing


class Kill(Callback):
    """Counts calls of Python functions from the run's setup on, and kills processes at one of them.

    Args:
        at: The number of the call; None: never.
        rank: The process that counts; None: each counts its own calls.
        victim: The process that is killed; None: the one that counts.
        folder: The folder to write each process's number of calls to; None: the numbers are not written.
    """

    def __init__(
        self, at: int | None, rank: int | None = 0, victim: int | None = None, folder: Path | None = None
    ) -> None:
        self.at = at
        self.rank = rank
        self.victim = victim
        self.folder = folder
        self.calls = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Begins to count."""
        if self.rank is None or trainer.global_rank == self.rank:
            os.register_at_fork(after_in_child=lambda: sys.setprofile(None))  # workers of loaders do not count
            sys.setprofile(self._count)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Ends counting."""
        sys.setprofile(None)
        if self.folder is not None:
            (self.folder / f"calls-{trainer.global_rank}.txt").write_text(str(self.calls))

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        if event != "call":
            return
        self.calls += 1
        if self.calls == self.at:
            os.kill(os.getpid() if self.victim is None else self.victim, signal.SIGKILL)
            if self.victim is not None:
                signal.pause()  # the processes of a run whose caller is gone are to end by themselves


# A run


def _callbacks(case: Case, folder: Path, kill: Callback) -> list[Callback]:
    monitored = "loss_epoch" if case.validation is None else "val_loss"
    if case.seed % 3 == 0 and case.validation is not None:
        monitored = "val_loss_epoch"
    callbacks: list[Callback] = [kill, LearningRateMonitor("step")]
    if case.early_stopping is not None:
        callbacks.append(EarlyStopping(monitored, patience=case.early_stopping, min_delta=0.05))
    if case.average:
        callbacks.append(EMAWeightAveraging(decay=0.5))
    interval: dict[str, Any] = {} if case.every_n_steps is None else {"every_n_train_steps": case.every_n_steps}
    checkpoints = folder / "checkpoints"
    callbacks.append(ModelCheckpoint(checkpoints, save_last=True, **interval))
    if case.top_k is not None:
        callbacks.append(ModelCheckpoint(checkpoints / "best", "{step}", monitor=monitored, save_top_k=case.top_k))
    return callbacks


def _strategy(case: Case) -> dict[str, Any]:
    if case.mode in ("ddp", "uneven"):
        return {"strategy": DDPStrategy(timeout=120), "devices": 2}
    if case.mode in ("pipeline", "replicas"):
        replicas = 2 if case.mode == "replicas" else 1
        options: dict[str, Any] = {"cut_before": ["net.4"], "micro_batches": 2, "timeout": 120, "replicas": replicas}
        return {"strategy": PipelineStrategy(engine="processes", **options), "devices": 2 * replicas}
    return {"strategy": "single_device"}


def train(
    case: Case, folder: Path, kill: Callback, *, resume: bool, strategy: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Runs a program to its end, unless it is killed, and returns what is compared.

    Args:
        case: The program.
        folder: Where its files go.
        kill: When it is killed.
        resume: Whether it resumes from its last checkpoint, if there is one.
        strategy: Arguments of the trainer that choose strategy and devices; None: those of the mode.
    """
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(case.seed)
    random.seed(case.seed)
    module = Module(case, folder)
    goes_on = resume and any((folder / "checkpoints").glob("last*.ckpt"))
    if goes_on:  # nothing may depend on the generators of the new process
        torch.manual_seed(case.seed + 1)
        random.seed(case.seed + 1)
    callbacks = _callbacks(case, folder, kill)
    train_loaders, val_loaders = _loaders(case)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=case.epochs,
        max_steps=case.max_steps,
        precision=case.precision,
        accumulate_grad_batches=case.accumulate,
        gradient_clip_val=case.clip,
        val_check_interval=case.validation,
        use_distributed_sampler=case.loaders != "split",
        limit_val_batches=0 if case.validation is None else None,
        num_sanity_val_steps=case.sanity_steps,
        log_every_n_steps=case.log_every,
        logger=CSVLogger(folder, name="", version=""),
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
        **(_strategy(case) if strategy is None else strategy),
    )
    trainer.fit(module, train_loaders, val_loaders, ckpt_path="last" if goes_on else None)
    return {
        "weights": module.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict(),
        "steps": [trainer.global_step, trainer.current_epoch],
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "best": [_best(callback) for callback in callbacks if isinstance(callback, ModelCheckpoint)],
    }


def _best(callback: ModelCheckpoint) -> list[Any]:
    """The best checkpoint: its name without a version, its score, and the weights in it.

    A file that a killed process has left makes Lightning append a version to the name.
    """
    if not callback.best_model_path:
        return []
    name = Path(callback.best_model_path).stem.partition("-v")[0]
    score = None if callback.best_model_score is None else float(callback.best_model_score)
    saved = torch.load(callback.best_model_path, weights_only=True)
    return [name, score, saved["global_step"], saved["state_dict"]]
