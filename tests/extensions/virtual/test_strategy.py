"""Weights and states of optimisers are the same to the bit on one device and on several processes."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler
from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection, R2Score

from equipoise import Trainer, VirtualDevicesStrategy
from tests.support.trainer_runs import refuses

SAMPLES = 115


class Noisy(L.LightningModule):
    """Statistics of a batch, dropout, and numbers of three generators."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 1)]
        self.net = nn.Sequential(*layers)
        self.seldom_used = nn.Linear(6, 1)
        self.mean = MeanMetric()
        self.metrics = MetricCollection([MeanSquaredError(), R2Score()])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, targets = batch
        noise = torch.from_numpy(np.random.randn(*features.shape)).float()
        outputs = self.net(features * random.uniform(0.9, 1.1) + 0.01 * noise)
        if features[0, 0] > 1:
            outputs = outputs + self.seldom_used(features)
        loss = nn.functional.mse_loss(outputs, targets)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.mean(outputs.detach())
        self.log("mean", self.mean)
        self.log("largest", outputs.detach().max(), reduce_fx="max")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        features, targets = batch
        outputs = self.net(features)
        self.log("val_loss", nn.functional.mse_loss(outputs, targets))
        self.metrics.update(outputs, targets)
        self.log_dict(self.metrics)
        self.log("val_sum", targets.sum(), reduce_fx="sum")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Weighed(Noisy):
    """The loss weighs as much as its targets do."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "loss_weight": batch[1].abs().sum()}


class Skipping(Noisy):
    """Some parts have no loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch[0][0, 1] > 0.5 else loss


class SaveAfter(L.Callback):
    """Saves a checkpoint after a number of batches, and ends the run."""

    def __init__(self, batches: int, path: Path) -> None:
        self.batches = batches
        self.path = path
        self.seen = 0

    def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
        self.seen += 1
        if self.seen == self.batches:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def run(kind: type[Noisy], devices: int, *, ckpt_path: Path | None = None, **options: Any) -> dict[str, Any]:
    """Train, and return the weights and the state of the optimiser."""
    L.seed_everything(5, verbose=False)
    module = kind()
    draw = torch.Generator().manual_seed(3)
    features = torch.randn(SAMPLES, 6, generator=draw)
    data = options.pop("data", TensorDataset(features, features.sum(1, keepdim=True)))
    names = ("collate_fn", "num_workers", "persistent_workers", "sampler", "shuffle", "batch_size")
    of_loader = {"shuffle": True, "batch_size": 24} | {name: options.pop(name) for name in names if name in options}
    fixed = TensorDataset(features, features.sum(1, keepdim=True))
    val_loader = options.pop("val", None)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    of_strategy = {name: options.pop(name) for name in ("count", "shares", "one_process") if name in options}
    strategy = VirtualDevicesStrategy(**of_strategy)
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=devices, max_epochs=2, **quiet, **options)
    loaders = DataLoader(data, **of_loader), val_loader or DataLoader(fixed, batch_size=10)
    trainer.fit(module, *loaders, ckpt_path=ckpt_path)
    state = {**module.state_dict(), **trainer.callback_metrics}
    assert {
        "loss_step",
        "loss_epoch",
        "largest",
        "mean",
        "MeanSquaredError",
        "R2Score",
        "val_loss",
        "val_sum",
    } <= state.keys()
    for index, entries in trainer.optimizers[0].state_dict()["state"].items():
        state |= {f"{index}.{name}": value for name, value in entries.items()}
    return state


@cache
def on_one_device(kind: type[Noisy], **options: Any) -> dict[str, Any]:
    return run(kind, 1, **options)


def assert_equal(state: dict[str, Any], expected: dict[str, Any]) -> None:
    assert state.keys() == expected.keys()
    different = [
        name for name in expected if not torch.equal(torch.as_tensor(state[name]), torch.as_tensor(expected[name]))
    ]
    assert not different


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Noisy, Weighed, Skipping])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}], ids=["", "window"])
@pytest.mark.parametrize("devices", [2, 3])
def test_equal_to_the_bit(kind: type[Noisy], devices: int, options: dict[str, Any]) -> None:
    assert_equal(run(kind, devices, **options), on_one_device(kind, **options))


@pytest.mark.slow
def test_six_parts_on_four_processes() -> None:
    assert_equal(run(Noisy, 4, count=6), on_one_device(Noisy, count=6))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_unequal_devices(precision: Any) -> None:
    assert_equal(run(Noisy, 2, shares=[1, 3], precision=precision), run(Noisy, 1, precision=precision))


class Plain(Noisy):
    """Layers that take parts of one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, 1))


@pytest.mark.slow
def test_fewer_samples_than_virtual_devices() -> None:
    """The last step has three samples, of which the second process has none."""
    assert_equal(run(Plain, 2, batch_size=28), on_one_device(Plain, batch_size=28))


def test_another_number_of_parts_is_another_run() -> None:
    assert not torch.equal(on_one_device(Noisy)["net.0.weight"], on_one_device(Noisy, count=4)["net.0.weight"])


def test_what_is_refused() -> None:
    refuses(lambda: VirtualDevicesStrategy(count=0), "count must be an integer of at least")
    refuses(lambda: VirtualDevicesStrategy(threads=0), "threads must be an integer of at least")
    refuses(lambda: run(Noisy, 3, count=2), "count=2", "3 real ones")
    refuses(lambda: VirtualDevicesStrategy(shares=[1, 0]), "shares must be a number above 0")
    refuses(lambda: run(Noisy, 2, shares=[1, 2, 3]), "3 numbers for 2 devices")
    refuses(lambda: run(Noisy, 2, sync_batchnorm=True), "sync_batchnorm=True")


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [(1, 2), (2, 3), (3, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3}], ids=["", "window"])
@pytest.mark.parametrize("batches", [3, 5, 7])
def test_continued_on_another_number(
    tmp_path: Path, numbers: tuple[int, int], options: dict[str, Any], batches: int
) -> None:
    """A run that ends in the midst of an epoch, also of a window, continues with other processes."""
    path = tmp_path / "x.ckpt"
    run(Noisy, numbers[0], callbacks=[SaveAfter(batches, path)], **options)
    assert_equal(run(Noisy, numbers[1], ckpt_path=path, **options), on_one_device(Noisy, **options))


class Augmented(Dataset[Any]):
    """Samples that draw from three generators."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        features = torch.arange(6.0) * random.random() + torch.randn(6) + float(np.random.rand())
        return features, features.sum(0, keepdim=True) + index


def padded(samples: list[Any]) -> list[Tensor]:
    """Draw, and depend on all samples that are collated together."""
    features, targets = map(torch.stack, zip(*samples, strict=True))
    return [features + features.mean() + 0.1 * torch.rand(()), targets]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("collate", [None, padded])
def test_random_data(workers: int, collate: Any) -> None:
    options = {"data": Augmented(), "collate_fn": collate, "num_workers": workers, "persistent_workers": workers > 0}
    assert_equal(run(Noisy, 3, **options), run(Noisy, 1, **options))
    sampler = WeightedRandomSampler(torch.arange(1.0, SAMPLES + 1).tolist(), SAMPLES)
    options |= {"sampler": sampler, "shuffle": None}
    assert_equal(run(Noisy, 2, **options), run(Noisy, 1, **{**options, "num_workers": 0, "persistent_workers": False}))
