"""A run on virtual devices, and what of it is to be the same on any number of real ones."""

from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from equipoise import Trainer, VirtualDevicesStrategy
from tests.extensions.virtual.modules import SAMPLES, Noisy
from tests.support import trainer_runs

LOGGED = {"loss_step", "loss_epoch", "largest", "mean", "MeanSquaredError", "R2Score", "val_loss", "val_sum"}
OF_LOADER = ("collate_fn", "num_workers", "persistent_workers", "sampler", "shuffle", "batch_size")
OF_STRATEGY = ("count", "shares", "one_process", "threads")
# What the number of devices brings along: no number of a run depends on it.
OF_DEVICES = ("shares", "one_process", "num_workers", "persistent_workers")


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


def run(kind: Any, devices: int, *, ckpt_path: Path | None = None, **options: Any) -> dict[str, Any]:
    """Train for two epochs of five batches of 24 samples; return weights, logged values and the optimiser's state."""
    L.seed_everything(5, verbose=False)
    module = kind()
    features = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(3))
    fixed = TensorDataset(features, features.sum(1, keepdim=True))
    data, val = options.pop("data", fixed), options.pop("val", None) or DataLoader(fixed, batch_size=10)
    of_loader = {"shuffle": True, "batch_size": 24, **_taken(options, OF_LOADER)}
    strategy = VirtualDevicesStrategy(**_taken(options, OF_STRATEGY))
    trainer = trainer_runs.trainer(strategy=strategy, devices=devices, max_epochs=2, **options)
    trainer.fit(module, DataLoader(data, **of_loader), val, ckpt_path=ckpt_path)
    state = {**module.state_dict(), **trainer.callback_metrics}
    assert state.keys() >= LOGGED
    for index, entries in trainer.optimizers[0].state_dict()["state"].items():
        state |= {f"{index}.{name}": value for name, value in entries.items()}
    return state


def _taken(options: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: options.pop(name) for name in names if name in options}


@cache
def on_one_device(kind: type[Noisy], **options: Any) -> dict[str, Any]:
    return run(kind, 1, **options)


def expected_of(kind: type[Noisy], options: dict[str, Any]) -> dict[str, Any]:
    """The run on one device that a run with these options is to be equal to."""
    return run(kind, 1, **{name: value for name, value in options.items() if name not in OF_DEVICES})


def small_trainer(**options: Any) -> Trainer:
    """A trainer of one epoch on one device, without validation."""
    strategy = VirtualDevicesStrategy(count=options.pop("count", 8))
    return trainer_runs.trainer(strategy=strategy, **{"devices": 1, "limit_val_batches": 0, **options})


def rows(count: int, batch_size: int = 16) -> DataLoader[Any]:
    """Random samples of six features and a target, in the order in which they lie."""
    return DataLoader(TensorDataset(torch.randn(count, 6), torch.randn(count, 1)), batch_size=batch_size)
