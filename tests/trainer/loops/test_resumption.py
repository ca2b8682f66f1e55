"""A run that is killed at any moment and resumed ends as one that was never killed."""

import random
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics.classification import MulticlassAccuracy

from tests.support.resumption import SavesInHooks, assert_resumes, seeded
from tests.support.trainer_runs import Small, loader, trainer

SAMPLES, FEATURES, CLASSES = 26, 6, 3


class Samples(Dataset[tuple[Tensor, Tensor, int]]):
    """Random samples, distorted anew with every generator there is whenever one is read."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.features = torch.randn(SAMPLES, FEATURES, generator=generator)
        self.labels = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        noise = 0.1 * torch.randn(FEATURES) + 0.01 * random.gauss(0, 1) + 0.01 * float(np.random.standard_normal())
        return self.features[index] + noise, self.labels[index], index


class Unsized(IterableDataset[tuple[Tensor, Tensor, int]]):
    """The same samples in random order, without length."""

    def __iter__(self) -> Any:
        return map(Samples().__getitem__, torch.randperm(SAMPLES).tolist())


class Module(L.LightningModule):
    """Everything that makes a resumption hard: dropout, batch statistics, metrics, a scheduler that watches."""

    def __init__(self, watched: str = "val_loss", interval: str = "epoch", automatic: bool = True) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, CLASSES)
        )
        self.accuracy, self.val_accuracy = MulticlassAccuracy(CLASSES), MulticlassAccuracy(CLASSES)
        self.watched, self.interval, self.automatic_optimization = watched, interval, automatic
        self.seen: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, labels, indices = batch
        self.seen.append(indices.tolist())
        logits = self.net(features)
        loss = nn.functional.cross_entropy(logits, labels)
        self.accuracy(logits, labels)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("train_accuracy", self.accuracy, on_step=False, on_epoch=True)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.net(batch[0])
        self.val_accuracy.update(logits, batch[1])
        self.log("val_accuracy", self.val_accuracy)
        self.log("val_loss", nn.functional.cross_entropy(logits, batch[1]))

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:  # each sample is counted once
            assert int((self.val_accuracy.tp + self.val_accuracy.fn).sum()) == SAMPLES

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.2)
        frequency = 3 if self.interval == "step" else 1
        config = {"monitor": self.watched, "interval": self.interval, "frequency": frequency}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **config}}


def train(kind: str, module: Module, callbacks: list[Any], ckpt_path: Path | None = None, **options: Any) -> Any:
    """Train for three epochs; return the trainer."""
    generator = torch.Generator().manual_seed(11) if kind == "own generator" else None
    data = DataLoader(Samples(), batch_size=4, shuffle=True, generator=generator)
    if kind == "unsized":
        data = DataLoader(Unsized(), batch_size=4)
    run = trainer(max_epochs=3, callbacks=callbacks, **options)
    run.fit(module, data, DataLoader(Samples(), batch_size=8), ckpt_path=ckpt_path)
    return run


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("shuffled", {}, {}),
    "own-generator": ("own generator", {}, {}),
    "unsized": ("unsized", {}, {}),
    "accumulated": ("shuffled", {}, {"accumulate_grad_batches": 3}),
    "validating-inside": ("shuffled", {"interval": "step"}, {"val_check_interval": 3}),
    "validating-seldom": ("shuffled", {"watched": "train_loss_epoch"}, {"check_val_every_n_epoch": 2}),
    "watching-the-epoch": ("shuffled", {"watched": "train_loss_epoch"}, {"limit_val_batches": 0}),
    "manual": ("shuffled", {"automatic": False}, {}),
    "limited": ("shuffled", {}, {"limit_train_batches": 5}),
}


@pytest.mark.quick_cases(3)
@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_a_run_killed_in_any_hook_continues_within_the_epoch_to_the_bit(name: str, tmp_path: Path) -> None:
    """Same weights, optimiser, counters, metrics, generators, samples."""
    kind, of_module, options = CASES[name]

    def run(callbacks: list[Any], path: Path | None) -> dict[str, Any]:
        module = Module(**of_module)
        run = train(kind, module, callbacks, path, **options)
        return {
            "weights": module,
            "optimiser": run.optimizers[0].state_dict(),
            "steps": (run.global_step, run.current_epoch, run.progress.batches_that_stepped),
            "metrics": dict(run.callback_metrics),
            "generators": (torch.get_rng_state(), random.getstate()),
            "samples": module.seen,
        }

    # The cases take turns, so that each place in an epoch meets each case and each epoch.
    assert_resumes(run, tmp_path, first_epoch=list(CASES).index(name))


@pytest.mark.slow
def test_a_batch_in_which_a_run_was_killed_is_computed_again(tmp_path: Path) -> None:
    """It has other random numbers then; still no sample is lost, or seen twice."""
    seeded(5)
    module = Module()
    saves = SavesInHooks(tmp_path, ("on_train_batch_start", "on_before_zero_grad", "on_after_backward"))
    train("shuffled", module, [saves])
    for path, hook, call, _ in saves.saved[::5]:
        resumed = Module()
        train("shuffled", resumed, [], path)
        noted = call - (hook == "on_train_batch_start")  # of which the last one is computed again
        seen, ended = module.seen[: call - 1] + resumed.seen[noted:], 7 * ((call - 1) // 7 + 1)
        assert seen[:ended] == module.seen[:ended], path.name  # the epoch in which it was killed continues in its order
        for epoch in range(3):
            assert sorted(index for batch in seen[7 * epoch : 7 * epoch + 7] for index in batch) == list(range(SAMPLES))


def test_gradients_of_an_open_accumulation_window_are_resumed(tmp_path: Path) -> None:
    """Those of the batches before the kill, also before the epoch's last batch."""

    class Momentum(Small):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    def run(callbacks: list[Any], path: Path | None) -> Momentum:
        module = Momentum()
        run = trainer(max_epochs=2, accumulate_grad_batches=3, callbacks=callbacks)
        run.fit(module, loader(7), ckpt_path=path)
        return module

    assert_resumes(run, tmp_path, ("on_train_batch_start",))


def test_values_of_the_epoch_are_of_the_whole_epoch_in_a_resumed_run(tmp_path: Path) -> None:
    class Numbers(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("mean", float(batch_idx), on_step=False, on_epoch=True)
            self.log("sum", float(batch_idx), on_step=False, on_epoch=True, reduce_fx="sum")
            return self.loss(batch)

    trainer(callbacks=[SavesInHooks(tmp_path, ["on_train_batch_end"], calls=[2])]).fit(Numbers(), loader(4))
    run = trainer()
    run.fit(Numbers(), loader(4), ckpt_path=tmp_path / "on_train_batch_end-02.ckpt")
    assert run.callback_metrics == {"mean": 1.5, "sum": 6.0}


@pytest.mark.filterwarnings("ignore:The checkpoint holds states of callbacks")
def test_a_checkpoint_of_lightning_skips_the_batches_that_were_seen(tmp_path: Path) -> None:
    """It lacks the generators, so these batches are not read again."""

    class Plain(Module):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def data() -> DataLoader[Any]:
        return DataLoader(Samples(), batch_size=4)

    saver = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(L.Trainer, max_epochs=2, callbacks=[saver], enable_checkpointing=True).fit(Plain(), data())
    resumed = Plain()
    run = trainer(max_epochs=2, limit_val_batches=0)
    run.fit(resumed, data(), ckpt_path=tmp_path / "epoch=0-step=3.ckpt")
    assert resumed.seen[0] == [12, 13, 14, 15]
    assert sorted(index for batch in resumed.seen[:4] for index in batch) == list(range(12, SAMPLES))
    assert run.global_step == 14
