"""A run on a GPU that is resumed ends as one that was never interrupted, to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.utilities import dim_zero_cat

from equipoise import PipelineStrategy, Strategy, Trainer
from tests.gpu.runs import CPU, GPU, QUIET

pytestmark = pytest.mark.filterwarnings("ignore:The checkpoint holds states of callbacks that are missing")

FEATURES, CLASSES, SAMPLES, BATCH = 6, 3, 40, 4
STEPS = 10  # of an epoch, after one of which the run is interrupted
INTERRUPTED = 7


class Collected(MeanMetric):
    """Keeps all values, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("values", [], dist_reduce_fx="cat")

    def update(self, value: Any, weight: Any = 1.0) -> None:
        super().update(value, weight)
        self.values.append(value.detach().reshape(1))

    def compute(self) -> Any:
        return dim_zero_cat(self.values).std()


class Module(LightningModule):
    """Dropout, batch statistics and metrics, whose states make the midst of an epoch hard to find again."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, CLASSES)
        )
        self.accuracy = MulticlassAccuracy(CLASSES)
        self.mean = MeanMetric()
        self.deviation = Collected()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        self.accuracy.update(logits, batch[1])
        self.mean.update(loss.detach())
        self.deviation.update(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        for name in ("accuracy", "mean", "deviation"):
            self.log(name, getattr(self, name), on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def loader() -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(2)
    features = torch.randn(SAMPLES, FEATURES, generator=draw)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=draw)
    return DataLoader(TensorDataset(features, labels), BATCH, shuffle=True)


def run(
    max_steps: int,
    *,
    strategy: Strategy | str = "single_device",
    devices: list[torch.device],
    folder: Path | None = None,
    ckpt_path: Path | None = None,
    **options: Any,
) -> tuple[Module, Trainer]:
    """Train; with a folder save there, in the midst of an epoch."""
    torch.manual_seed(5)
    module = Module()
    if ckpt_path is not None:
        # What a new process would have drawn.
        torch.manual_seed(99)
    saving = [] if folder is None else [ModelCheckpoint(folder, every_n_train_steps=INTERRUPTED, save_top_k=-1)]
    trainer = Trainer(
        strategy=strategy,
        devices=devices,
        max_steps=max_steps,
        callbacks=[*saving],
        **{**QUIET, "enable_checkpointing": bool(saving), **options},
    )
    trainer.fit(module, loader(), ckpt_path=ckpt_path)
    return module, trainer


def checkpoint_in(folder: Path) -> Path:
    (path,) = folder.glob("*.ckpt")
    return path


def assert_same(one: tuple[Module, Trainer], other: tuple[Module, Trainer]) -> None:
    """Compare weights, statistics, states of the optimiser, and the values of the epoch."""
    expected = one[0].state_dict()
    for name, value in other[0].state_dict().items():
        assert torch.equal(value.cpu(), expected[name].cpu()), name
    assert one[1].callback_metrics.keys() == other[1].callback_metrics.keys()
    for name, value in one[1].callback_metrics.items():
        assert torch.equal(value.cpu(), other[1].callback_metrics[name].cpu()), name


WAYS: dict[str, Any] = {
    "single_device": lambda: {"strategy": "single_device", "devices": [GPU]},
    "dp": lambda: {"strategy": "dp", "devices": [GPU, GPU]},
    "pipeline": lambda: {"strategy": PipelineStrategy(micro_batches=2), "devices": [GPU, GPU]},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "accumulated": {"accumulate_grad_batches": 4},
    "16-mixed": {"precision": "16-mixed"},
}


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("options", OPTIONS)
def test_a_resumed_run_ends_as_an_uninterrupted_one(name: str, options: str, tmp_path: Path) -> None:
    steps = STEPS * 2
    undisturbed = run(steps, **WAYS[name](), **OPTIONS[options])
    run(INTERRUPTED, folder=tmp_path, **WAYS[name](), **OPTIONS[options])
    resumed = run(steps, ckpt_path=checkpoint_in(tmp_path), **WAYS[name](), **OPTIONS[options])
    assert_same(undisturbed, resumed)


@pytest.mark.parametrize(("first", "then"), [(CPU, GPU), (GPU, CPU)], ids=["to the GPU", "to the CPU"])
def test_a_run_continues_on_another_device(first: torch.device, then: torch.device, tmp_path: Path) -> None:
    """Generators differ, so only what they do not decide is compared."""
    run(INTERRUPTED, devices=[first], folder=tmp_path)
    module, trainer = run(STEPS, devices=[then], ckpt_path=checkpoint_in(tmp_path))
    assert trainer.global_step == STEPS
    assert all(parameter.isfinite().all() for parameter in module.parameters())
    assert float(trainer.callback_metrics["accuracy"]) <= 1.0
