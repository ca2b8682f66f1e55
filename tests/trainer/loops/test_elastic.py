"""A run continues with another number of processes, or another strategy, and ends as one that nothing ever happened to.

One run notes what it computes, and saves a checkpoint in the middle of an epoch and of an accumulation window. Another
one resumes from there.
"""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, TensorDataset
from torchmetrics import CatMetric, PearsonCorrCoef
from torchmetrics.classification import MulticlassAccuracy

from equipoise import ConfigurationError, PipelineStrategy
from tests.support.equality import assert_equal
from tests.support.resumption import SavesInHooks
from tests.support.trainer_runs import trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore:The checkpoint holds states of callbacks", "ignore:.* promised .* batches by its length"
)

SAMPLES, FEATURES, CLASSES, EPOCHS = 29, 4, 3, 2
# Samples of a step in every run.
TOGETHER = 12 // 2
slow = pytest.mark.slow


def samples(count: int = SAMPLES) -> TensorDataset:
    """Features in float64, and labels."""
    draw = torch.Generator().manual_seed(11)
    features = torch.randn(count, FEATURES, dtype=torch.float64, generator=draw)
    return TensorDataset(features, torch.randint(CLASSES, (count,), generator=draw))


class Plain(L.LightningModule):
    """A layer, trained on one loader or on several, whose samples may come one by one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net: nn.Module = nn.Linear(FEATURES, CLASSES).double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = list(batch.values()) if isinstance(batch, dict) else [batch]
        features = torch.cat([part[0].view(-1, FEATURES) for part in parts])
        labels = torch.cat([part[1].view(-1) for part in parts])
        return {"loss": nn.functional.cross_entropy(self.net(features), labels), "loss_weight": len(labels)}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Watched(Plain):
    """Logs every kind of value, and notes those of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.labels = CatMetric()
        self.epochs: list[dict[str, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, labels = batch
        logits = self.net(features)
        loss = nn.functional.cross_entropy(logits, labels)
        self.accuracy.update(logits, labels)
        self.labels.update(labels)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("count", float(len(labels)), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("largest", logits.max().detach(), on_step=False, on_epoch=True, reduce_fx="max")
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        labels = torch.as_tensor(self.labels.compute())
        self.labels.reset()
        values = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        # The loss of the last step is that of the samples of rank 0.
        del values["loss"], values["loss_step"]
        self.epochs.append({**values, "labels": float(labels.sum()), "labels_count": float(labels.numel())})

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def pipeline(replicas: int) -> PipelineStrategy:
    return PipelineStrategy(engine="processes", cut_before=["net.2"], micro_batches=2, replicas=replicas)


# The strategy, the devices, and how many processes read batches.
STRATEGIES: dict[str, tuple[Any, int, int]] = {
    "single": (lambda: "single_device", 1, 1),
    "balanced": (lambda: "balanced", 2, 1),
    "dp": (lambda: "dp", 2, 1),
    **{f"ddp {processes}": (lambda: "ddp", processes, processes) for processes in (1, 2, 3, 4)},
    "pipeline": (lambda: pipeline(1), 2, 1),
    "two pipelines": (lambda: pipeline(2), 4, 2),
}


def batches_of(writer: str) -> DataLoader[Any]:
    """The loader of the run that writes the checkpoint, which the user does not change for the one that resumes."""
    return DataLoader(samples(), batch_size=TOGETHER // STRATEGIES[writer][2], shuffle=True)


def fit(name: str, module: Any, data: Any, *callbacks: Any, path: Path | None = None, **options: Any) -> Any:
    """Train with a strategy for two epochs, or continue from a checkpoint; return the trainer."""
    strategy, devices, _ = STRATEGIES[name]
    # Nothing depends on the generators of the new process.
    torch.manual_seed(5 if path is None else 99)
    options = {"callbacks": list(callbacks), **options}
    run = trainer(strategy=strategy(), devices=devices, max_epochs=EPOCHS, precision="64-true", **options)
    run.fit(module, data, ckpt_path=path)
    return run


def saves_after(batch: int, folder: Path) -> SavesInHooks:
    """Saves after a batch of the run, in which all processes have one."""
    return SavesInHooks(folder, ["on_train_batch_end"], [batch])


def saved_after(batch: int, folder: Path) -> Path:
    return folder / f"on_train_batch_end-{batch:02d}.ckpt"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("before", "after", "window", "batch"),
    [
        ("single", "ddp 2", 3, 2),
        ("ddp 2", "ddp 3", 3, 7),
        ("ddp 3", "balanced", 1, 2),
        pytest.param("ddp 4", "single", 3, 7, marks=slow),
        # The last batch of an epoch, whose values are those of all processes before.
        pytest.param("ddp 2", "single", 1, 5, marks=slow),
        pytest.param("balanced", "ddp 4", 3, 2, marks=slow),
        pytest.param("ddp 2", "dp", 3, 2, marks=slow),
        # The gradients of an open window are in the processes of the stages.
        pytest.param("pipeline", "ddp 1", 3, 2, marks=slow),
        pytest.param("ddp 2", "pipeline", 3, 2, marks=slow),
        pytest.param("two pipelines", "ddp 3", 3, 2, marks=slow),
        pytest.param("two pipelines", "pipeline", 3, 2, marks=slow),
    ],
)
def test_a_run_is_resumed_with_another_strategy_or_number_of_processes(
    before: str, after: str, window: int, batch: int, tmp_path: Path
) -> None:
    expected, module = Watched(), Watched()
    fit(before, expected, batches_of(before), saves_after(batch, tmp_path), accumulate_grad_batches=window)
    path = saved_after(batch, tmp_path)
    fit(after, module, batches_of(before), path=path, accumulate_grad_batches=window)
    # Replicas and micro-batches of a process add up their values in float32.
    in_parts = not {before, after}.isdisjoint(("balanced", "dp", "pipeline", "two pipelines"))
    assert len(expected.epochs) == EPOCHS
    assert_equal(expected, module, 1e-12, title="Weights, to which each sample adds its share once")
    assert_equal(expected.epochs, module.epochs, 1e-7 if in_parts else 1e-12)


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


class OwnBatches(BatchSampler):
    """A batch sampler of the user's own."""


LOADERS: dict[str, Any] = {
    # The checkpoint holds a batch that one process had read ahead.
    "no length": lambda: DataLoader(samples(), batch_size=6, sampler=OwnOrder(None)),
    "too long a length": lambda: DataLoader(samples(), batch_size=6, sampler=OwnOrder(SAMPLES + 8)),
    "sampler": lambda: DataLoader(samples(), batch_size=3, sampler=OwnOrder()),
    "batch sampler": lambda: DataLoader(samples(), batch_sampler=OwnBatches(OwnOrder(), 3, False)),
    "two loaders": lambda: {
        "long": DataLoader(samples(), batch_size=3, shuffle=True),
        "short": DataLoader(samples(8), batch_size=2, shuffle=True),
    },
}


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("no length", "single", "ddp 2"),
        ("too long a length", "single", "ddp 2"),
        pytest.param("sampler", "ddp 2", "single", marks=slow),
        pytest.param("batch sampler", "ddp 2", "ddp 3", marks=slow),
        pytest.param("two loaders", "ddp 2", "single", marks=slow),
        pytest.param("two loaders", "ddp 2", "ddp 3", marks=slow),
    ],
)
def test_own_samplers_and_several_loaders_are_resumed(kind: str, before: str, after: str, tmp_path: Path) -> None:
    expected, module = Plain(), Plain()
    batch = 3 if "length" in kind else 2
    steps = fit(before, expected, LOADERS[kind](), saves_after(batch, tmp_path)).global_step
    assert fit(after, module, LOADERS[kind](), path=saved_after(batch, tmp_path)).global_step == steps
    assert_equal(expected, module, 1e-12)


# Where it cannot be


class Stream(IterableDataset[Any]):
    """Samples that the data set itself shares out."""

    def __init__(self, indices: Any = range(12)) -> None:
        self.indices = indices

    def shard(self, num_shards: int, index: int) -> "Stream":
        return Stream(self.indices[index::num_shards])

    def __iter__(self) -> Any:
        return map(samples().__getitem__, self.indices)


class Positioned(DataLoader[Any]):
    """A loader that saves a position of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


TWELVE = DataLoader(samples(12), batch_size=2)
STREAM, POSITIONED = DataLoader(Stream(), batch_size=2), Positioned(samples(12), batch_size=2)
SINGLE = DataLoader(samples(12), batch_size=None)


@pytest.mark.parametrize(
    ("data", "other", "reason"),
    [
        (TWELVE, DataLoader(samples(12), batch_size=3), "the loaders had batch_size 2"),
        pytest.param(STREAM, STREAM, "Stream is a stream, so the samples that it has read", marks=slow),
        pytest.param(POSITIONED, POSITIONED, "Positioned saves a position of its own", marks=slow),
        pytest.param(SINGLE, SINGLE, "a loader with batch_size=None makes no batches", marks=slow),
    ],
)
def test_other_batches_are_refused_in_an_epoch_and_announced_at_its_end(
    data: Any, other: Any, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit("ddp 2", Plain(), data, saves_after(2, tmp_path)).save_checkpoint(tmp_path / "end.ckpt")
    refusal = f"in the middle of an epoch by another number of processes.*{reason}.*Resume with as many"
    with pytest.raises(ConfigurationError, match=refusal):
        fit("single", Plain(), other, path=saved_after(2, tmp_path))
    fit("single", Plain(), other, path=tmp_path / "end.ckpt")
    assert f"A step has other samples from now on: {reason}" in caplog.text


class Correlated(Plain):
    """Keeps a metric that merges the states of processes by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.correlation = PearsonCorrCoef()
        self.epochs: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.correlation.update(self.net(batch[0])[:, 0].detach(), batch[1].double())
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.epochs.append(float(self.correlation.compute()))
        self.correlation.reset()


@pytest.mark.thorough
def test_a_metric_that_nobody_can_merge_is_refused_by_fewer_processes(tmp_path: Path) -> None:
    """Each process may take the state of another one, but no process two of them."""
    expected, more = Correlated(), Correlated()
    fit("ddp 2", expected, TWELVE, saves_after(2, tmp_path))
    fit("ddp 3", more, TWELVE, path=saved_after(2, tmp_path))
    assert_equal(expected.epochs, more.epochs, 1e-6)
    with pytest.raises(ConfigurationError, match=r"the metric 'correlation' \(PearsonCorrCoef\) of 2 processes"):
        fit("single", Correlated(), TWELVE, path=saved_after(2, tmp_path))
