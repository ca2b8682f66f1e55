"""A run goes on with another number of processes, or another strategy, and ends as one that nothing ever happened to.

One run of each writer notes what it computes, and saves a checkpoint in the middle of an epoch and of an accumulation
window. Others go on from there.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler
from torchmetrics import CatMetric, MeanMetric, PearsonCorrCoef
from torchmetrics.classification import MulticlassAccuracy

from equipoise import ConfigurationError, Trainer
from tests.conftest import ignoring

pytestmark = ignoring("Checkpoint directory")

SAMPLES, FEATURES, CLASSES, EPOCHS = 29, 4, 3, 2
# Samples of a step in every run.
TOGETHER = 12 // 2


class Samples(Dataset[Any]):
    """Numbered samples in float64."""

    def __init__(self, count: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(11)
        self.features = torch.randn(count, FEATURES, dtype=torch.float64, generator=generator)
        self.labels = torch.randint(CLASSES, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        return self.features[index], self.labels[index], index


class Watched(L.LightningModule):
    """Logs every kind of value, and notes which samples each epoch has trained on.

    Args:
        separate: Whether it has a metric whose states cannot be merged.
    """

    def __init__(self, separate: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.mean = MeanMetric()
        self.labels = CatMetric()
        self.correlation = PearsonCorrCoef() if separate else None
        self.seen: list[tuple[int, int, list[int]]] = []
        self.seen_by_all: list[tuple[int, int, list[int]]] = []
        self.epochs: list[dict[str, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, labels, indices = batch
        self.seen.append((self.current_epoch, batch_idx, indices.tolist()))
        logits = self.net(features)
        loss = nn.functional.cross_entropy(logits, labels)
        self.accuracy.update(logits, labels)
        self.mean.update(labels)
        self.labels.update(labels)
        if self.correlation is not None:
            self.correlation.update(logits[:, 0].detach(), labels.double())
            self.log("correlation", self.correlation, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("count", float(len(labels)), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("largest", logits.max().detach(), on_step=False, on_epoch=True, reduce_fx="max")
        self.log("smallest", logits.min().detach(), on_step=False, on_epoch=True, reduce_fx="min")
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        labels = torch.as_tensor(self.labels.compute())
        self.labels.reset()
        values = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        self.epochs.append({**values, "labels": float(labels.sum()), "labels_count": float(labels.numel())})

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        gathered = self.trainer.strategy.gather_objects(self.seen)
        checkpoint["seen"] = [each for seen in gathered for each in seen]
        checkpoint["epochs"] = list(self.epochs)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = list(checkpoint["seen"]) if self.global_rank == 0 else []
        self.epochs = list(checkpoint["epochs"])

    def on_train_end(self) -> None:
        gathered = self.trainer.strategy.gather_objects(self.seen)
        self.seen_by_all = [each for seen in gathered for each in seen]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Saves(L.Callback):
    """Saves a checkpoint after some batches of the run, in which all processes have a batch.

    Args:
        folder: Where the files go, named by the number of the batch.
        batches: The numbers, from 0.
    """

    def __init__(self, folder: Path, batches: tuple[int, ...]) -> None:
        self.folder = folder
        self.batches = batches
        self.at = -1

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.at += 1
        if self.at in self.batches:
            trainer.save_checkpoint(self.folder / f"{self.at}.ckpt")


@dataclass
class Run:
    """How a run is computed, and on what.

    Attributes:
        strategy, devices: Arguments of the trainer.
        loader: Arguments of the loader; those of the writer's, since the user changes nothing.
        accumulate: The number of batches in a window.
    """

    strategy: str
    devices: int
    loader: dict[str, Any] = field(default_factory=dict)
    accumulate: int = 1

    def fit(self, module: Watched, checkpoint: Path | None = None, callbacks: Any = (), **options: Any) -> Any:
        """Train, or go on; return the trainer."""
        # Nothing depends on the generators of the new process.
        torch.manual_seed(5 if checkpoint is None else 99)
        trainer = Trainer(
            strategy=self.strategy,
            devices=["cpu"] * self.devices,
            max_epochs=EPOCHS,
            accumulate_grad_batches=self.accumulate,
            callbacks=list(callbacks),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            precision="64-true",
            **options,
        )
        data: Any = DataLoader(Samples(), **{"shuffle": True, **self.loader})
        trainer.fit(module, data, ckpt_path=checkpoint)
        return trainer


def assert_same(expected: Watched, actual: Watched, tolerance: float = 1e-12) -> None:
    """The same weights, values of every epoch, and samples of every step.

    Args:
        expected: The undisturbed run.
        actual: The other.
        tolerance: That of logged values.
    """
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(actual.state_dict()[name], value, rtol=1e-12, atol=1e-12)
    assert len(actual.epochs) == len(expected.epochs) == EPOCHS
    for one, other in zip(expected.epochs, actual.epochs, strict=True):
        # The loss of the last step is that of the samples of rank 0.
        one, other = ({n: v for n, v in each.items() if n not in ("loss", "loss_step")} for each in (one, other))
        assert other == pytest.approx(one, rel=tolerance, abs=tolerance)
    assert steps_of(actual.seen_by_all) == steps_of(expected.seen_by_all)


def steps_of(seen: list[tuple[int, int, list[int]]]) -> dict[tuple[int, int], Counter[int]]:
    """The samples of each step, each of which counts once in its epoch."""
    steps: dict[tuple[int, int], Counter[int]] = {}
    for epoch, batch, indices in seen:
        steps.setdefault((epoch, batch), Counter()).update(indices)
    for epoch in range(EPOCHS):
        drawn = sum((samples for (of, _), samples in steps.items() if of == epoch), Counter())
        assert drawn == {index: 1 for index in range(SAMPLES)}
    return steps


WRITERS = {
    "single": ("single_device", 1),
    "balanced": ("balanced", 2),
    "ddp 2": ("ddp", 2),
    "ddp 3": ("ddp", 3),
    "ddp 4": ("ddp", 4),
}
OTHERS = {**WRITERS, "dp": ("dp", 2), "ddp 1": ("ddp", 1)}


def writer_of(name: str, folder: Path, accumulate: int, at: tuple[int, ...], **loader: Any) -> tuple[Run, Watched]:
    """Let a run note what it computes, and save checkpoints."""
    strategy, devices = WRITERS[name]
    per_process = TOGETHER // (devices if strategy == "ddp" else 1)
    run = Run(strategy, devices, {"batch_size": per_process, **loader}, accumulate)
    module = Watched()
    run.fit(module, callbacks=[Saves(folder, at)])
    return run, module


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs that have written checkpoints, each of which is computed once."""
    runs: dict[Any, Any] = {}

    def write(name: str, accumulate: int) -> Any:
        key = name, accumulate
        if key not in runs:
            folder = tmp_path_factory.mktemp("written")
            runs[key] = folder, *writer_of(name, folder, accumulate, (1, 6))
        return runs[key]

    return write


def cases() -> list[Any]:
    """The strategy and the processes before and after, the batches of a window, and the number of the last batch."""
    listed = []
    for number, (before, after) in enumerate((b, a) for b in WRITERS for a in OTHERS if a != b):
        listed.append(pytest.param(before, after, 3 if number % 3 else 1, 1 if number % 2 else 6))
    return listed


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(("before", "after", "accumulate", "at"), cases())
def test_any_number_of_processes(before: str, after: str, accumulate: int, at: int, written: Any) -> None:
    folder, run, expected = written(before, accumulate)
    strategy, devices = OTHERS[after]
    module = Watched()
    resumed = Run(strategy, devices, run.loader, run.accumulate)
    resumed.fit(module, folder / f"{at}.ckpt")
    # Replicas of a process add up their values in float32.
    in_replicas = not {before, after}.isdisjoint(("balanced", "dp"))
    assert_same(expected, module, 1e-7 if in_replicas else 1e-12)
