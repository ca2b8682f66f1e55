"""The search for a learning rate before a fit: Lightning's curve, and nothing else changed."""

import copy
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from equipoise import RunReport, Trainer
from tests.support.equality import assert_equal
from tests.support.quiet import QUIET
from tests.support.trainer_runs import refuses

OPTIONS = {"accelerator": "cpu", **QUIET, "max_epochs": 20, "max_steps": 12, "precision": "64-true"}


class Fitted(L.LightningModule):
    """A perceptron that fits a sum, (batch, 4) → (batch, 1)."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.drawn: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.drawn.append(torch.rand(()).item())
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Hyper(Fitted):
    """Keeps its learning rate among its hyperparameters, and schedules it."""

    def __init__(self, learning_rate: float = 0.1) -> None:
        super().__init__()
        del self.lr
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams["learning_rate"], momentum=0.5)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=200)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def data(shuffle: bool = False) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(64, 4, generator=generator, dtype=torch.float64)
    targets = features.sum(1, keepdim=True)
    return DataLoader(TensorDataset(features, targets), batch_size=8, shuffle=shuffle, generator=generator)


@pytest.mark.few_cases(3)
@pytest.mark.parametrize(
    "settings",
    [
        {"max_lr": 10.0},
        {"max_lr": 10.0, "early_stop_threshold": None, "num_training_steps": 40},
        {"min_lr": 0.0, "max_lr": 2.0, "mode": "linear"},
        {"update_attr": False, "num_training_steps": 15},
    ],
    ids=["exponential", "to the end", "linear", "search alone"],
)
def test_the_curve_and_the_fit_are_those_of_lightning(settings: dict[str, Any], tmp_path: Any) -> None:
    ours, theirs = Fitted(), Fitted()
    finder, reference = LearningRateFinder(**settings), LearningRateFinder(**settings)
    Trainer(**OPTIONS, callbacks=[finder]).fit(ours, data())
    L.Trainer(**OPTIONS, callbacks=[reference], default_root_dir=tmp_path).fit(theirs, data())

    assert finder.optimal_lr.results["lr"] == reference.optimal_lr.results["lr"]
    assert_equal(reference.optimal_lr.results["loss"], finder.optimal_lr.results["loss"], 1e-12)
    assert ours.lr == theirs.lr
    assert_equal(theirs, ours, 1e-12)


def test_the_tuner_searches_without_a_fit() -> None:
    module = Hyper()
    before = copy.deepcopy(module)
    trainer = Trainer(**OPTIONS)
    found = Tuner(trainer).lr_find(module, data(), max_lr=10.0)
    assert module.hparams["learning_rate"] == found.suggestion() != 0.1
    assert_equal(before, module)
    assert trainer.global_step == 0
    assert trainer.callbacks == []
    assert module.drawn == []
    trainer.fit(module, data())
    assert trainer.global_step == OPTIONS["max_steps"]


def test_learning_rate_finder_searches_before_the_fit_and_leaves_no_trace_in_it() -> None:
    """Orders, draws and weights of the fit are those of a fit that had the rate from the beginning."""
    batches: list[int] = []
    counter = LambdaCallback(on_train_batch_end=lambda *args: batches.append(args[-1]))
    torch.manual_seed(7)
    searched, loader = Fitted(), data(shuffle=True)
    state = copy.deepcopy(torch.get_rng_state())
    Trainer(**OPTIONS, callbacks=[LearningRateFinder(max_lr=10.0), counter]).fit(searched, loader)
    assert len(batches) == OPTIONS["max_steps"]

    known = Fitted(lr=searched.lr)
    torch.set_rng_state(state)
    Trainer(**OPTIONS).fit(known, data(shuffle=True))
    assert_equal(known, searched)
    assert searched.drawn == known.drawn


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("strategy", ["dp", "pipeline", pytest.param("ddp", marks=pytest.mark.slow)])
def test_several_devices_find_the_same_curve(strategy: str) -> None:
    """Each of two processes of ddp reads half of a batch, every second sample."""
    curves = []
    for name, devices in (("single_device", 1), (strategy, 2)):
        finder = LearningRateFinder(max_lr=10.0, num_training_steps=20)
        loader = data()
        if name == "ddp":
            loader = DataLoader(loader.dataset, batch_size=4)
        options = {**OPTIONS, "accelerator": "cpu", "devices": devices, "strategy": name}
        Trainer(**options, callbacks=[finder]).fit(Fitted(), loader)
        curves.append(finder.optimal_lr.results)
    one, several = curves
    assert several["lr"] == one["lr"]
    assert_equal(one["loss"], several["loss"], 1e-10)


def test_windows_of_several_batches_are_one_step() -> None:
    finder = LearningRateFinder(max_lr=10.0, num_training_steps=20, early_stop_threshold=None)
    Trainer(**OPTIONS, accumulate_grad_batches=3, callbacks=[finder]).fit(Fitted(), data())
    assert len(finder.optimal_lr.results["lr"]) == 20


def test_too_few_steps_suggest_nothing() -> None:
    module = Fitted()
    finder = LearningRateFinder(num_training_steps=5)
    with pytest.warns(UserWarning, match="too few for a suggestion"):
        Trainer(**OPTIONS, callbacks=[finder]).fit(module, data())
    assert module.lr == 0.1


def test_no_search_in_a_trial_run_or_a_resumed_fit(tmp_path: Any) -> None:
    finder = LearningRateFinder()
    module = Fitted()
    with pytest.warns(UserWarning, match="fast_dev_run"):
        Trainer(**OPTIONS, fast_dev_run=True, callbacks=[finder]).fit(module, data())
    first = Trainer(**OPTIONS)
    first.fit(module, data())
    first.save_checkpoint(tmp_path / "first.ckpt")
    Trainer(**{**OPTIONS, "max_steps": 20}, callbacks=[finder]).fit(
        Fitted(), data(), ckpt_path=str(tmp_path / "first.ckpt")
    )
    assert finder.optimal_lr is None


def without_rate() -> Fitted:
    module = Fitted()
    del module.lr
    return module


def with_attribute(name: str, value: Any) -> Fitted:
    module = Fitted()
    setattr(module, name, value)
    return module


@pytest.mark.parametrize(
    ("make", "settings", "words"),
    [
        (without_rate, {}, ["LearningRateFinder", "`lr` or `learning_rate`", "attr_name"]),
        (Fitted, {"attr_name": "speed"}, ["LearningRateFinder", "`speed`", "update_attr=False"]),
        (lambda: with_attribute("automatic_optimization", False), {}, ["automatic_optimization=False"]),
        (lambda: with_attribute("source", (number for number in range(3))), {}, ["cannot be copied", "generator"]),
        (Fitted, {"num_training_steps": 0}, ["num_training_steps=0", "at least 1"]),
        (Fitted, {"min_lr": 1.0, "max_lr": 1.0}, ["min_lr=1.0", "smaller than max_lr=1.0"]),
        (Fitted, {"min_lr": -1.0}, ["min_lr=-1.0", "cannot be negative"]),
        (Fitted, {"min_lr": 0.0}, ["min_lr=0.0", 'mode="linear"']),
    ],
)
def test_searches_that_are_refused(make: Callable[[], Fitted], settings: dict[str, Any], words: list[str]) -> None:
    made = make()
    trainer = Trainer(**OPTIONS, callbacks=[LearningRateFinder(**settings)])
    refuses(lambda: trainer.fit(made, data()), *words)
    assert made.drawn == []


def test_a_failed_search_puts_everything_back() -> None:
    class Failing(Fitted):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 2:
                raise ArithmeticError("in the third step")
            return loss

    module, loader = Failing(), data(shuffle=True)
    order = loader.generator.get_state()
    before = copy.deepcopy(module)
    state = torch.get_rng_state()
    trainer = Trainer(**OPTIONS, callbacks=[LearningRateFinder()])
    with pytest.raises(ArithmeticError):
        trainer.fit(module, loader)
    assert_equal(before, module)
    assert_equal((state, order), (torch.get_rng_state(), loader.generator.get_state()))


def test_the_report_draws_the_curve(tmp_path: Any) -> None:
    module = Fitted()
    callbacks = [LearningRateFinder(max_lr=10.0), RunReport()]
    Trainer(**OPTIONS, callbacks=callbacks, default_root_dir=tmp_path).fit(module, data())
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "The learning rate" in page
    assert "suggested: " in page
    assert 'data-log="yes"' in page
