"""Lightning's other callbacks, unmodified."""

from pathlib import Path
from typing import Any

from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    DeviceStatsMonitor,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    RichModelSummary,
    RichProgressBar,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
    WeightAveraging,
)
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from .. import data
from ..data import FEATURES
from ..harness import Case, Record, columns, parity
from ..modules import Classifier, with_optimizers


def normed() -> Classifier:
    return Classifier(batch_norm=True)


def scheduled(module: Any) -> Any:
    optimizer = SGD(
        [
            {"params": module.net[0].parameters(), "name": "first"},
            {"params": module.net[-1].parameters(), "name": "last"},
        ],
        0.1,
        momentum=0.9,
    )
    return [optimizer], [{"scheduler": StepLR(optimizer, 2, 0.9), "interval": "step", "name": "rate"}]


class WithBackbone(Classifier):
    """A backbone to be frozen and a head, of which only the head is given to the optimiser."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES))

    def forward(self, features: Any) -> Any:
        return self.net(self.backbone(features))

    def configure_optimizers(self) -> Any:
        return SGD(filter(lambda p: p.requires_grad, self.parameters()), 0.1)


class EveryOther(WeightAveraging):
    """Averages after every second step and at the end of epochs."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return (step_idx is not None and step_idx % 2 == 0) or epoch_idx is not None


class Spikes(Classifier):
    """Its loss jumps in the fourth batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1000.0 if batch_idx == 3 else 1.0)


def averaging(**options: Any) -> Any:
    return lambda: [StochasticWeightAveraging(**options)]


def bars(trainer: Any) -> Any:
    bar = trainer.progress_bar_callback
    return {"train": bar.total_train_batches, "val": bar.total_val_batches, "class": type(bar).__name__}


def names_only(record: Record) -> bool:
    return len(columns(record)) > 4


def header(trainer: Any) -> list[str]:
    """The names in the table, where its values are readings of clocks and counters."""
    return sorted(Path(trainer.logger.log_dir, "metrics.csv").read_text().splitlines()[0].split(","))


SHOWS = {"enable_progress_bar": True}
CLOCKS = ["metrics.csv", "time'", "per_sec'"]

CASES = [
    Case(
        name="rates-by-step",
        module=with_optimizers(scheduled),
        callbacks=lambda: [LearningRateMonitor("step", log_momentum=True, log_weight_decay=True)],
        options={"log_every_n_steps": 2},
    ),
    Case(
        name="swa-linear-with-scheduler-and-accumulation",
        module=with_optimizers(scheduled, batch_norm=True, dropout=0.2),
        callbacks=averaging(swa_lrs=[0.02, 0.03], swa_epoch_start=2, annealing_strategy="linear"),
        options={"max_epochs": 4, "accumulate_grad_batches": 2},
        data=data.shuffled,
    ),
    Case(
        name="weight-averaging",
        module=normed,
        callbacks=lambda: [EveryOther(use_buffers=False)],
        options={"val_check_interval": 3},
    ),
    Case(
        name="backbone-finetuning",
        module=WithBackbone,
        callbacks=lambda: [BackboneFinetuning(1, verbose=False, lambda_func=lambda epoch: 2.0)],
        options={"max_epochs": 4},
        proves=lambda r: len(r["optimizers"][0]["param_groups"]) == 2,
    ),
    Case(name="pruning", callbacks=lambda: [ModelPruning("l1_unstructured", amount=0.3)]),
    Case(
        name="rich-summary", callbacks=lambda: [RichModelSummary(max_depth=2)], options={"enable_model_summary": True}
    ),
    Case(
        name="rich-bar",
        callbacks=lambda: [RichProgressBar(refresh_rate=2)],
        options=SHOWS,
        observe=bars,
        data=data.several_val,
    ),
    Case(
        name="device-statistics",
        callbacks=lambda: [DeviceStatsMonitor(cpu_stats=True)],
        observe=header,
        proves=names_only,
        ignore=CLOCKS,
    ),
    Case(
        name="throughput",
        callbacks=lambda: [ThroughputMonitor(lambda batch: len(batch[0]), window_size=3)],
        observe=header,
        proves=names_only,
        ignore=CLOCKS,
        watch=False,
    ),
    Case(name="spike", module=Spikes, callbacks=lambda: [SpikeDetection(warmup=1)], raises=TrainingSpikeException),
    Case(
        name="many-together",
        module=with_optimizers(scheduled, batch_norm=True),
        callbacks=lambda: [
            LearningRateMonitor(),
            EMAWeightAveraging(decay=0.8),
            ModelCheckpoint(monitor="val_loss", save_last=True),
        ],
        options={"max_epochs": 3, "gradient_clip_val": 0.5},
    ),
]

test_parity = parity(CASES)
