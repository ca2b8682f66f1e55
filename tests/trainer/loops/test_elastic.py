"""A run continues with another number of processes, or another strategy, and ends as one that nothing ever happened to.

One run of each writer notes what it computes, and saves a checkpoint in the middle of an epoch and of an accumulation
window. Others resume from there.
"""

import csv
import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler
from torchmetrics import CatMetric, MeanMetric, PearsonCorrCoef
from torchmetrics.classification import MulticlassAccuracy

from equipoise import ConfigurationError, PipelineStrategy, Trainer
from tests.support.all_cases import dealt
from tests.support.trainer_runs import trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore:The checkpoint holds states of callbacks", "ignore:.* promised .* batches by its length"
)

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
    """Logs every kind of value, and notes which samples each epoch has trained on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.mean = MeanMetric()
        self.labels = CatMetric()
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
    """Saves a checkpoint after some batches of the training, in which all processes have a batch.

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
    """Strategy, devices and data of a run.

    Attributes:
        strategy, devices: Arguments of the trainer.
        loader: Arguments of the loader; those of the writer's, since the user changes nothing.
        accumulate: The number of batches in a window.
    """

    strategy: Any
    devices: int
    loader: dict[str, Any] = field(default_factory=dict)
    accumulate: int = 1

    def fit(self, module: Watched, checkpoint: Path | None = None, callbacks: Any = (), **options: Any) -> Any:
        """Train, or continue; return the trainer."""
        # Nothing depends on the generators of the new process.
        torch.manual_seed(5 if checkpoint is None else 99)
        writes = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
        run: Trainer = trainer(
            strategy=self.strategy,
            devices=self.devices,
            max_epochs=EPOCHS,
            accumulate_grad_batches=self.accumulate,
            callbacks=list(callbacks),
            enable_checkpointing=writes,
            precision="64-true",
            log_every_n_steps=1,
            **options,
        )
        data: Any = DataLoader(Samples(), **{"shuffle": True, **self.loader})
        run.fit(module, data, ckpt_path=checkpoint)
        return run


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
        assert drawn == dict.fromkeys(range(SAMPLES), 1)
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
    """The strategy and the processes before and after, the batches of a window, and the number of the last batch.

    Each strategy occurs after several others, with each window and each number.
    """
    listed: list[Any] = []
    for row, before in enumerate(WRITERS):
        others = [after for after in OTHERS if after != before]
        for after in dealt(others, row % 2, 2):
            number = len(listed)
            listed.append(pytest.param(before, after, 3 if number % 3 else 1, 1 if number % 2 else 6))
    return listed


@pytest.mark.quick_cases(3)
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


@pytest.mark.slow
def test_three_changes_in_one_run(tmp_path: Path) -> None:
    run, expected = writer_of("ddp 2", tmp_path, 3, (1,))
    checkpoint = tmp_path / "1.ckpt"
    # Each run counts on from the checkpoint.
    for at, strategy, devices in [(4, "ddp", 3), (7, "single_device", 1), (10, "ddp", 4)]:
        module = Watched()
        Run(strategy, devices, run.loader, 3).fit(module, checkpoint, [Saves(tmp_path, (at,))])
        assert_same(expected, module)
        checkpoint = tmp_path / f"{at}.ckpt"


def pipeline(replicas: int) -> Run:
    """A pipeline of two stages in processes of their own, with three batches in a window."""
    strategy = PipelineStrategy(engine="processes", cut_before=["net.2"], micro_batches=2, replicas=replicas)
    return Run(strategy, 2 * replicas, {"batch_size": TOGETHER // replicas}, 3)


def ddp(processes: int) -> Run:
    """As many processes, with three batches in a window."""
    return Run("ddp", processes, {"batch_size": TOGETHER // processes}, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [(pipeline(1), ddp(1)), (ddp(2), pipeline(1)), (pipeline(2), ddp(3)), (pipeline(2), pipeline(1))],
)
def test_stages_in_processes(before: Run, after: Run, tmp_path: Path) -> None:
    """The gradients of an open window are in the processes of the stages."""
    expected, module = Watched(), Watched()
    before.fit(expected, callbacks=[Saves(tmp_path, (1,))])
    resumed = dataclasses.replace(after, loader=before.loader)
    resumed.fit(module, tmp_path / "1.ckpt")
    # Micro-batches add up their values in float32.
    assert_same(expected, module, 1e-7)


@pytest.mark.parametrize("length", [None, SAMPLES - 8, SAMPLES + 8])
def test_samplers_of_unknown_length(length: int | None, tmp_path: Path) -> None:
    """The checkpoint holds a batch that one process had read ahead."""
    data = DataLoader(Samples(), batch_size=6, sampler=OwnOrder(length))
    expected, module = Plain(), Plain()
    count = fit(expected, data, *OTHERS["single"], callbacks=[Saves(tmp_path, (2,))]).global_step
    assert fit(module, data, *OTHERS["ddp 2"], ckpt_path=tmp_path / "2.ckpt").global_step == count
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-12, atol=1e-12)


class InTurn(Sampler[list[int]]):
    """Batches of a sampler of the user's own, in random order."""

    def __init__(self) -> None:
        self.batches = BatchSampler(range(SAMPLES), 3, False)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        batches = list(self.batches)
        return (batches[index] for index in torch.randperm(len(batches)).tolist())


KINDS = ["sampler", "batch sampler", "two loaders"]
CHANGES = [("ddp 2", "single"), ("ddp 2", "ddp 3"), ("single", "ddp 2")]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "change"), dealt([*product(KINDS, CHANGES)], 0, 2))
def test_loaders(kind: str, change: tuple[str, str], tmp_path: Path) -> None:
    """Samplers of the user's own, and loaders that are read together."""
    before, after = change
    loaders: dict[str, dict[str, Any]] = {
        "sampler": {"batch_size": 3, "sampler": OwnOrder(), "shuffle": None},
        "batch sampler": {"batch_sampler": InTurn(), "shuffle": None},
        "two loaders": {"batch_size": 3},
    }
    options = loaders[kind]
    data: Any = DataLoader(Samples(), **{"shuffle": True, **options})
    expected, module = Plain(), Plain()
    if kind == "two loaders":
        data = {"long": data, "short": DataLoader(Samples(8), batch_size=2, shuffle=True)}
    fit(expected, data, *OTHERS[before], callbacks=[Saves(tmp_path, (1,))])
    fit(module, data, *OTHERS[after], ckpt_path=tmp_path / "1.ckpt")
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-12, atol=1e-12)


class OwnOrder(Sampler[int]):
    """A sampler of the user's own, which draws from a global generator, and may say a wrong length or none."""

    def __init__(self, length: int | None = SAMPLES) -> None:
        self.length = length

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError
        return self.length

    def __iter__(self) -> Any:
        return iter(torch.randperm(SAMPLES).tolist())


class Plain(L.LightningModule):
    """A layer, trained on one loader or on several."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = nn.Linear(FEATURES, CLASSES).double()
        self.correlation: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = list(batch.values()) if isinstance(batch, dict) else [batch]
        samples = sum(len(labels) for _, labels, _ in parts)
        losses = [
            nn.functional.cross_entropy(self.net(features), labels, reduction="sum") for features, labels, _ in parts
        ]
        if self.correlation is not None:
            self.correlation.update(self.net(parts[0][0])[:, 0].detach(), parts[0][1].double())
        return {"loss": torch.stack(losses).sum() / samples, "loss_weight": samples}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module: Any, data: Any, strategy: str, devices: int, callbacks: Any = (), **options: Any) -> Any:
    """Train two epochs."""
    torch.manual_seed(99 if options else 5)
    given = {"strategy": strategy, "devices": devices, "callbacks": list(callbacks)}
    run = trainer(max_epochs=EPOCHS, precision="64-true", **given)
    run.fit(module, data, **options)
    return run


# Where it cannot be


class Stream(IterableDataset[Any]):
    """Samples that the data set itself shares out."""

    def __init__(self, indices: Any = range(12)) -> None:
        self.indices = indices

    def shard(self, num_shards: int, index: int) -> "Stream":
        return Stream(self.indices[index::num_shards])

    def __iter__(self) -> Any:
        samples = Samples()
        return (samples[index] for index in self.indices)


class Positioned(DataLoader[Any]):
    """A loader that saves a position of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (DataLoader(Stream(), batch_size=2), "Stream is a stream, so the samples that it has read"),
        (Positioned(Samples(12), batch_size=2), "Positioned saves a position of its own"),
        (DataLoader(Samples(12), batch_size=None), "a loader with batch_size=None makes no batches"),
    ],
)
def test_what_cannot_be_kept(data: Any, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = Labelled()
    run = fit(module, data, "ddp", 2, [Saves(tmp_path, (1,))])
    run.save_checkpoint(tmp_path / "end.ckpt")
    refusal = f"in the middle of an epoch by another number of processes.*{reason}.*Resume with as many"
    with pytest.raises(ConfigurationError, match=refusal):
        fit(Labelled(), data, "single_device", 1, ckpt_path=tmp_path / "1.ckpt")
    fit(Labelled(), data, "single_device", 1, ckpt_path=tmp_path / "end.ckpt")
    assert f"A step has other samples from now on: {reason}" in caplog.text


class Labelled(Plain):
    """The same for samples without a dimension of their own."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, labels, _ = batch
        return nn.functional.cross_entropy(self.net(features.view(-1, FEATURES)), torch.as_tensor(labels).view(-1))


def test_another_batch_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The user may choose another size of a step, but not in the middle of an epoch."""
    data = DataLoader(Samples(12), batch_size=2)
    run = fit(Plain(), data, "ddp", 2, [Saves(tmp_path, (1,))])
    run.save_checkpoint(tmp_path / "end.ckpt")
    other = DataLoader(Samples(12), batch_size=3)
    with pytest.raises(ConfigurationError, match="the loaders had batch_size 2, and now it is 3"):
        fit(Plain(), other, "single_device", 1, ckpt_path=tmp_path / "1.ckpt")
    fit(Plain(), other, "single_device", 1, ckpt_path=tmp_path / "end.ckpt")
    assert "A step has other samples from now on: the loaders had batch_size 2" in caplog.text


def test_metrics_that_nobody_can_merge(tmp_path: Path) -> None:
    """Each process may take the state of another one, but no process two of them."""
    data = DataLoader(Samples(12), batch_size=2)
    expected, more, fewer = Correlated(), Correlated(), Correlated()
    fit(expected, data, "ddp", 2, [Saves(tmp_path, (1,))])
    fit(more, data, "ddp", 3, ckpt_path=tmp_path / "1.ckpt")
    assert more.epochs == pytest.approx(expected.epochs, rel=1e-6)
    with pytest.raises(ConfigurationError, match=r"the metric 'correlation' \(PearsonCorrCoef\) of 2 processes"):
        fit(fewer, data, "single_device", 1, ckpt_path=tmp_path / "1.ckpt")


class Correlated(Plain):
    """Keeps a metric that merges the states of processes by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.correlation = PearsonCorrCoef()
        self.epochs: list[float] = []

    def on_train_epoch_end(self) -> None:
        self.epochs.append(float(self.correlation.compute()))
        self.correlation.reset()


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("ddp 3", "ddp 2"), ("ddp 2", "single"), ("single", "ddp 2")])
def test_at_the_end_of_an_epoch(before: str, after: str, tmp_path: Path) -> None:
    """The hook that wrote the checkpoint is followed by the epoch's values, which are those of all processes."""
    strategy, devices = WRITERS[before]
    run = Run(strategy, devices, {"batch_size": TOGETHER // devices})
    writes = ModelCheckpoint(tmp_path, "{epoch}", monitor="loss_epoch", save_top_k=-1)
    run.fit(Watched(), callbacks=[writes], logger=CSVLogger(tmp_path / "before"))
    resumed = Run(*OTHERS[after], run.loader)
    resumed.fit(Watched(), tmp_path / "epoch=0.ckpt", logger=CSVLogger(tmp_path / "after"))
    expected, actual = (values_of_epochs(tmp_path / name) for name in ("before", "after"))
    assert len(expected) == EPOCHS
    assert actual == pytest.approx(expected, rel=1e-12)


def values_of_epochs(folder: Path) -> list[float]:
    """The losses of epochs in the rows that a logger has written."""
    with (folder / "lightning_logs" / "version_0" / "metrics.csv").open() as file:
        return [float(row["loss_epoch"]) for row in csv.DictReader(file) if row["loss_epoch"]]
