"""A run that is killed at any moment and resumed ends as one that was never killed."""

import random
import warnings
from collections import Counter
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

from tests.support.trainer_runs import trainer

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


class Stream(IterableDataset[tuple[Tensor, Tensor, int]]):
    """The same without length."""

    def __init__(self) -> None:
        self.samples = Samples()

    def __iter__(self) -> Any:
        order = torch.randperm(SAMPLES).tolist()
        return (self.samples[index] for index in order)


class Module(L.LightningModule):
    """Everything that makes a resumption hard: dropout, batch statistics, metrics, a scheduler that watches."""

    def __init__(self, watched: str = "val_loss", interval: str = "epoch", automatic: bool = True) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, CLASSES)
        )
        self.accuracy, self.val_accuracy = MulticlassAccuracy(CLASSES), MulticlassAccuracy(CLASSES)
        self.validated: list[int] = []
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
        self.validated.append(int((self.val_accuracy.tp + self.val_accuracy.fn).sum()))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.2)
        config = {"scheduler": scheduler, "monitor": self.watched, "interval": self.interval}
        if self.interval == "step":
            config["frequency"] = 3
        return {"optimizer": optimizer, "lr_scheduler": config}


class SaveEverywhere(L.Callback):
    """Saves a checkpoint in every hook in which a run could be killed, as the last of all callbacks.

    Args:
        folder: Where the files go.
        hooks: The names of the hooks. Default: those of which a run continues as if it had not been killed.

    Attributes:
        saved: The files, each with the batches that had been seen.
        places: Where in an epoch each was saved: the hook, and how often it had been called in that epoch.
    """

    HOOKS = (
        "on_train_epoch_start",
        "on_train_batch_end",
        "on_validation_start",
        "on_validation_batch_end",
        "on_validation_epoch_end",
        "on_validation_end",
        "on_train_epoch_end",
    )

    def __init__(self, folder: Path, hooks: tuple[str, ...] = HOOKS) -> None:
        self.folder, self.counts, self.saved = folder, Counter(), []
        self.places: list[tuple[str, int]] = []
        for hook in hooks:
            setattr(self, hook, self._saver(hook))

    def _saver(self, hook: str) -> Any:
        def save(trainer: Any, *args: Any) -> None:
            if trainer.sanity_checking:
                return
            self.counts[hook] += 1
            path = self.folder / f"{hook}-{self.counts[hook]:02d}.ckpt"
            trainer.save_checkpoint(path)
            self.saved.append((path, [list(batch) for batch in trainer.lightning_module.seen]))
            self.counts[hook, trainer.current_epoch] += 1
            self.places.append((hook, self.counts[hook, trainer.current_epoch]))

        return save

    def saved_in_turn(self, first: int) -> list[Any]:
        """Each place in an epoch once, the next one in the next epoch.

        Args:
            first: The number of the epoch of the first place; another one for each case lets each place meet each
                epoch.
        """
        by_place: dict[tuple[str, int], list[Any]] = {}
        for place, saved in zip(self.places, self.saved, strict=True):
            by_place.setdefault(place, []).append(saved)
        return [saved[(first + number) % len(saved)] for number, saved in enumerate(by_place.values())]


def loaders(kind: str) -> tuple[Any, Any]:
    """A training and a validation loader."""
    val = DataLoader(Samples(), batch_size=8)
    if kind == "unsized":
        return DataLoader(Stream(), batch_size=4), val
    generator = torch.Generator().manual_seed(11) if kind == "own generator" else None
    return DataLoader(Samples(), batch_size=4, shuffle=True, generator=generator), val


def seeded(seed: int = 5) -> None:
    """Seeds every generator."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def train(kind: str, module: Module, callbacks: list[Any], ckpt_path: Path | None = None, **options: Any) -> Any:
    """Trains for three epochs."""
    run = trainer(max_epochs=3, callbacks=callbacks, **options)
    run.fit(module, *loaders(kind), ckpt_path=ckpt_path)
    return run


def outcome(trainer: Any, module: Module) -> dict[str, Any]:
    """Return everything that must not depend on a kill."""
    optimizer = trainer.optimizers[0]
    return {
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "state": [value for state in optimizer.state.values() for value in state.values()],
        "lr": optimizer.param_groups[0]["lr"],
        "steps": (trainer.global_step, trainer.current_epoch, trainer.progress.batches_that_stepped),
        "metrics": dict(trainer.callback_metrics),
        "generator": torch.get_rng_state(),
        "python": random.getstate(),
    }


def assert_equal(expected: Any, actual: Any, place: str) -> None:
    """Compares to the bit, and names the first place that differs."""
    if isinstance(expected, dict):
        assert expected.keys() == actual.keys(), f"{place}: {expected.keys() ^ actual.keys()}"
        for key in expected:
            assert_equal(expected[key], actual[key], f"{place}[{key!r}]")
    elif isinstance(expected, Tensor):
        assert torch.equal(expected, actual), f"{place}: {expected} became {actual}"
    elif isinstance(expected, list):
        assert len(expected) == len(actual), place
        for index, (left, right) in enumerate(zip(expected, actual, strict=True)):
            assert_equal(left, right, f"{place}[{index}]")
    else:
        assert expected == actual, f"{place}: {expected} became {actual}"


CASES = {
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
@pytest.mark.parametrize("name", CASES)
def test_killed_anywhere(name: str, tmp_path: Path) -> None:
    """Resumes from a checkpoint of every hook: same weights, optimiser, counters, metrics, generators, samples.

    The cases take turns, so that each place in an epoch meets each case and each epoch.
    """
    kind, of_module, options = CASES[name]
    seeded()
    module, saver = Module(**of_module), SaveEverywhere(tmp_path)
    reference = outcome(train(kind, module, [saver], **options), module)
    assert len(saver.saved) > 20
    for path, _ in saver.saved_in_turn(list(CASES).index(name)):
        seeded()
        resumed = Module(**of_module)
        seeded(99)  # nothing may depend on the generators of the new process
        run = train(kind, resumed, [], path, **options)
        assert_equal(reference, outcome(run, resumed), path.name)
        assert resumed.seen == module.seen, path.name  # the list is restored, and continues
        assert set(resumed.validated) <= set(module.validated), path.name  # each sample is counted once


@pytest.mark.slow
def test_killed_while_a_batch_is_computed(tmp_path: Path) -> None:
    """That batch is computed again, with the generators as they are then; still no sample is lost, or seen twice."""
    seeded()
    module, saver = (
        Module(),
        SaveEverywhere(tmp_path, ("on_train_batch_start", "on_before_zero_grad", "on_after_backward")),
    )
    train("shuffled", module, [saver])
    for path, seen_before in saver.saved[::5]:
        resumed = Module()
        train("shuffled", resumed, [], path)
        done = seen_before if "start" in path.name else seen_before[:-1]
        seen, ended = done + resumed.seen[len(seen_before) :], 7 * (len(done) // 7 + 1)
        assert seen[:ended] == module.seen[:ended], path.name  # the epoch in which it was killed continues in its order
        for epoch in range(3):
            assert sorted(index for batch in seen[7 * epoch : 7 * epoch + 7] for index in batch) == list(range(SAMPLES))


def test_killed_before_a_batch_of_an_accumulation_window(tmp_path: Path) -> None:
    """The gradients of the batches before it are kept, also those before the epoch's last batch."""

    class Plain(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(FEATURES, 1)
            self.seen: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def fit(callbacks: list[Any], path: Path | None = None) -> Tensor:
        torch.manual_seed(1)
        module = Plain()
        run = trainer(max_epochs=2, accumulate_grad_batches=3, callbacks=callbacks)
        run.fit(module, DataLoader(Samples().features, batch_size=4), ckpt_path=path)
        return module.layer.weight.detach()

    saver = SaveEverywhere(tmp_path, ("on_train_batch_start",))
    expected = fit([saver])
    assert len(saver.saved) == 14
    for path, _ in saver.saved:
        assert torch.equal(fit([], path), expected), path.name


@pytest.mark.filterwarnings("ignore:The checkpoint holds states of callbacks")
def test_without_our_state_batches_are_skipped(tmp_path: Path) -> None:
    """A checkpoint of Lightning lacks the generators: the batches that were seen are not read again."""

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
