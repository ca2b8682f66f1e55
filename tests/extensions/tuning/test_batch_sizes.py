"""The search for a batch size before a fit: predicted, confirmed by real steps, and nothing else changed."""

from collections.abc import Callable
from functools import cache
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from equipoise import TokenBatchSampler, Trainer
from equipoise.extensions.planning import MemoryPrediction, PlannedDevice, predict_memory
from equipoise.extensions.tuning import batch_sizes
from tests.support.equality import assert_equal
from tests.support.quiet import QUIET
from tests.support.trainer_runs import refuses

SAMPLES, FEATURES = 4096, 64
OPTIONS = {**QUIET, "max_steps": 2, "max_epochs": -1, "precision": "64-true", "accelerator": "cpu"}


class Sized(L.LightningModule):
    """A perceptron, (batch, 64) → (batch, 1), whose batch size is its attribute.

    Attributes:
        seen: Sizes of the batches of the training steps.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.batch_size = 4
        self.seen: list[int] = []
        self.net = nn.Sequential(nn.Linear(FEATURES, 256), nn.Tanh(), nn.Linear(256, 1)).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(len(batch[0]))
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.001)

    def train_dataloader(self) -> Any:
        return made_loader(self.batch_size)


class Data(L.LightningDataModule):
    """The same loader, with the batch size among the hyperparameters."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return made_loader(self.hparams["batch_size"])


class Ordinary(Sized):
    """Has loaders only from a data module."""

    def __init__(self) -> None:
        super().__init__()
        del self.batch_size

    train_dataloader = L.LightningModule.train_dataloader


def made_loader(batch_size: int) -> DataLoader[Any]:
    features = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return DataLoader(TensorDataset(features), batch_size=batch_size, shuffle=True)


@cache
def predicted() -> MemoryPrediction:
    """The memory of a step, predicted once for all tests."""
    example = [torch.zeros(8, FEATURES, dtype=torch.float64)]
    return predict_memory(Sized(), example, precision="64-true")


def bytes_for(batch_size: int) -> int:
    """Return the memory in which this batch size, and no larger one, fits."""
    return predicted().peak(batch_size).nbytes


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Give the devices of a trainer an amount of memory. The prediction is that of all tests."""

    def give(nbytes: int) -> None:
        device = PlannedDevice(name="cpu", kind="cpu", memory=nbytes)
        monkeypatch.setattr(batch_sizes, "devices_of", lambda trainer: [device] * len(trainer.strategy.devices))
        monkeypatch.setattr(batch_sizes, "predict_step", lambda *args, **options: predicted())

    return give


class Bounded(Sized):
    """Runs out of memory with batches that are larger than a number of samples."""

    most = 40

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if len(batch[0]) > self.most:
            raise torch.OutOfMemoryError(f"{len(batch[0])} samples")
        return super().training_step(batch, batch_idx)


@pytest.mark.thorough
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, 64), ({"mode": "binsearch", "margin": 0.0}, 100), ({"mode": "binsearch"}, 95), ({"max_val": 40}, 32)],
    ids=["power", "binsearch", "margin", "bound"],
)
def test_the_batch_size_finder_predicts_the_largest_size_that_fits(
    settings: dict[str, Any], expected: int, room: Any
) -> None:
    room(bytes_for(100))
    module, finder = Sized(), BatchSizeFinder(**settings)
    Trainer(**OPTIONS, callbacks=[finder]).fit(module)
    assert finder.optimal_batch_size == module.batch_size == expected
    assert module.seen == [expected] * 2


def test_the_size_of_a_data_module_is_searched(room: Any) -> None:
    room(bytes_for(50))
    module, data = Ordinary(), Data()
    Trainer(**OPTIONS, callbacks=[BatchSizeFinder()]).fit(module, datamodule=data)
    assert data.hparams["batch_size"] == 32
    assert module.seen == [32] * 2


@pytest.mark.slow
def test_a_size_is_never_more_than_the_samples() -> None:
    """The memory is that of the machine, and the prediction is made here."""
    module = Sized()
    with pytest.warns(UserWarning, match=f"An epoch of {SAMPLES:,} samples has 1 step with batches of {SAMPLES:,}"):
        Trainer(**OPTIONS, callbacks=[BatchSizeFinder(mode="binsearch")]).fit(module)
    assert module.batch_size == SAMPLES


@pytest.mark.filterwarnings("ignore:An epoch of")
def test_a_size_is_never_more_than_the_samples_of_the_longest_of_several_loaders(room: Any) -> None:
    class Several(Sized):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch["long"], batch_idx) + super().training_step(batch["short"], batch_idx)

        def train_dataloader(self) -> Any:
            samples = torch.ones(64, FEATURES).double()
            sets = {"long": TensorDataset(samples), "short": TensorDataset(samples[:16])}
            return {name: DataLoader(each, self.batch_size) for name, each in sets.items()}

    room(bytes_for(1024))
    module = Several()
    Trainer(**OPTIONS, callbacks=[BatchSizeFinder()]).fit(module)
    assert module.batch_size == 64


@pytest.mark.parametrize(("mode", "expected"), [("power", 32), ("binsearch", 40)])
def test_a_predicted_size_is_confirmed_by_a_step_or_made_smaller(mode: str, expected: int, room: Any) -> None:
    room(bytes_for(70))
    module = Bounded()
    Trainer(**OPTIONS, callbacks=[BatchSizeFinder(mode=mode, margin=0.0)]).fit(module)
    assert module.batch_size == expected


def test_replicas_share_a_batch(room: Any) -> None:
    """Each of two devices has half of the batch, so about twice as many samples fit."""
    room(bytes_for(100))
    options = {**OPTIONS, "strategy": "dp", "devices": ["cpu", "cpu"]}
    module = Sized()
    Trainer(**options, callbacks=[BatchSizeFinder(mode="binsearch", margin=0.0)]).fit(module)
    assert 120 <= module.batch_size <= 200


def test_the_tuner_searches_without_a_fit(room: Any) -> None:
    room(bytes_for(100))
    module = Sized()
    trainer = Trainer(**OPTIONS)
    assert Tuner(trainer).scale_batch_size(module) == module.batch_size == 64
    assert trainer.global_step == 0
    assert module.seen == []


def test_nothing_else_notices_the_search(room: Any) -> None:
    """Weights and orders of the fit are those of a fit that had the size from the beginning."""
    room(bytes_for(100))
    modules = []
    for callbacks in ([BatchSizeFinder()], []):
        module = Sized()
        module.batch_size = 64
        torch.manual_seed(11)
        Trainer(**OPTIONS, callbacks=callbacks).fit(module)
        modules.append(module)
    assert_equal(*modules)


def test_a_failed_search_gives_the_data_module_its_size_back() -> None:
    class Failing(Ordinary):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise ArithmeticError("in the first step")

    data = Data(batch_size=7)
    with pytest.raises(ArithmeticError):
        Trainer(**OPTIONS, callbacks=[BatchSizeFinder()]).fit(Failing(), datamodule=data)
    assert data.hparams["batch_size"] == 7


class ByTokens(Sized):
    max_tokens = 2

    def train_dataloader(self) -> Any:
        sampler = TokenBatchSampler([1] * SAMPLES, self.max_tokens)
        return DataLoader(made_loader(1).dataset, batch_sampler=sampler)


class Tight(Bounded):
    most = 2


@pytest.mark.parametrize(
    ("fits", "make", "settings", "words"),
    [
        (100, Sized, {"batch_arg_name": "size"}, ["`size`", "batch_arg_name"]),
        (0, Sized, {}, ["0 samples are predicted to fit", "init_val=2"]),
        (100, Tight, {"max_trials": 3}, ["ran out of memory with each of 3 sizes", "down to 16"]),
        (100, ByTokens, {"batch_arg_name": "max_tokens"}, ["TokenBatchSampler", "`equipoise plan`"]),
        (100, Sized, {"init_val": 0}, ["init_val=0", "at least 1"]),
        (100, Sized, {"steps_per_trial": 0}, ["steps_per_trial=0", "at least 1"]),
        (100, Sized, {"max_trials": 0}, ["max_trials=0", "at least 1"]),
        (100, Sized, {"init_val": 8, "max_val": 4}, ["max_val=4", "smaller than init_val=8"]),
        (4 * SAMPLES, Sized, {"init_val": 2 * SAMPLES}, [f"has {SAMPLES} samples", f"than init_val={2 * SAMPLES}"]),
    ],
)
def test_searches_that_are_refused(
    fits: int, make: type[Sized], settings: dict[str, Any], words: list[str], room: Any
) -> None:
    room(bytes_for(fits) if fits else bytes_for(1) - 1)
    refuses(lambda: Trainer(**OPTIONS, callbacks=[BatchSizeFinder(**settings)]).fit(make()), *words)


def test_loaders_that_were_passed_are_refused() -> None:
    trainer = Trainer(**OPTIONS, callbacks=[BatchSizeFinder()])
    refuses(lambda: trainer.fit(Sized(), made_loader(4)), "loaders were passed", "train_dataloader()")


def test_a_margin_leaves_one_sample(room: Any) -> None:
    room(bytes_for(1))
    module = Sized()
    Trainer(**OPTIONS, callbacks=[BatchSizeFinder(mode="binsearch", init_val=1, margin=0.5)]).fit(module)
    assert module.batch_size == 1
