"""A run on a GPU that is resumed ends as one that was never interrupted, to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from equipoise import PipelineStrategy, Trainer
from tests.gpu.runs import CPU, GPU, QUIET, Noisy, samples
from tests.support.batches import CLASSES
from tests.support.equality import assert_equal

pytestmark = pytest.mark.filterwarnings("ignore:The checkpoint holds states of callbacks that are missing")

STEPS = 10  # of an epoch, after one of which the run is interrupted
INTERRUPTED = 7


class Measured(Noisy):
    """Dropout, batch statistics and metrics, whose states make the midst of an epoch hard to find again."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(CLASSES)
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch["features"])
        loss = nn.functional.cross_entropy(logits, batch["label"])
        self.accuracy.update(logits, batch["label"])
        self.mean.update(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"accuracy": self.accuracy, "mean": self.mean}, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def run(max_steps: int, *, folder: Path | None = None, ckpt_path: Path | None = None, **options: Any) -> dict[str, Any]:
    """Train; with a folder save there, in the midst of an epoch. Return weights, statistics and values of the epoch."""
    torch.manual_seed(5)
    module = Measured()
    if ckpt_path is not None:
        # What a new process would have drawn.
        torch.manual_seed(99)
    saving = [] if folder is None else [ModelCheckpoint(folder, every_n_train_steps=INTERRUPTED, save_top_k=-1)]
    trainer = Trainer(
        max_steps=max_steps, callbacks=[*saving], **{**QUIET, "enable_checkpointing": bool(saving), **options}
    )
    trainer.fit(module, samples(40, 4), ckpt_path=ckpt_path)
    assert trainer.global_step == max_steps
    return {**module.state_dict(), **trainer.callback_metrics}


def checkpoint_in(folder: Path) -> Path:
    (path,) = folder.glob("*.ckpt")
    return path


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
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, "16-mixed") for name in WAYS),
        *(("single_device", "accumulated"), ("dp", "float32"), ("pipeline", "accumulated")),
    ],
)
def test_a_resumed_run_ends_as_an_uninterrupted_one(name: str, options: str, tmp_path: Path) -> None:
    steps = STEPS * 2
    undisturbed = run(steps, **WAYS[name](), **OPTIONS[options])
    run(INTERRUPTED, folder=tmp_path, **WAYS[name](), **OPTIONS[options])
    resumed = run(steps, ckpt_path=checkpoint_in(tmp_path), **WAYS[name](), **OPTIONS[options])
    assert_equal(undisturbed, resumed)


@pytest.mark.parametrize(("first", "then"), [(CPU, GPU), (GPU, CPU)], ids=["to the GPU", "to the CPU"])
def test_a_run_continues_on_another_device(first: torch.device, then: torch.device, tmp_path: Path) -> None:
    """Generators differ, so only what they do not decide is compared."""
    run(INTERRUPTED, devices=[first], folder=tmp_path)
    ended = run(STEPS, devices=[then], ckpt_path=checkpoint_in(tmp_path))
    assert all(value.isfinite().all() for value in ended.values())
    assert float(ended["accuracy"]) <= 1.0
