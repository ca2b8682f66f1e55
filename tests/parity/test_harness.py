"""The comparison itself: it finds what differs, whatever kind it is, and says where."""

import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback

import equipoise

from .comparison import assert_same, differences
from .harness import Case, check
from .modules import Classifier

NAN = float("nan")


@pytest.mark.parametrize(
    ("expected", "actual", "line"),
    [
        (
            torch.zeros(2, 2),
            torch.tensor([[0.0, 0.0], [1.0, 2.0]]),
            "w: 2 of 4 values differ, first [2]: 0.0 became 1.0",
        ),
        (torch.tensor(1.0), torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)), "w: 1 of 1 values differ"),
        (torch.tensor(0.0), torch.tensor(-0.0), "0.0 became -0.0"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), "w.dtype: torch.float32 became torch.float64"),
        (torch.zeros(2), torch.zeros(3), "w.shape"),
        (torch.zeros(2), torch.zeros(2, requires_grad=True), "w.requires_grad"),
        ({"a": 1}, {"a": 2}, "w['a']: int 1 became int 2"),
        ({"a": 1}, {}, "w['a']: missing, Lightning has int 1"),
        ({}, {"a": 1}, "w['a']: not in Lightning, here int 1"),
        ([1, 2], [1, 2, 3], "w: 2 entries became 3"),
        ((1,), [1], "w: tuple (1,) became list [1]"),
        (1, 1.0, "w: int 1 became float 1.0"),
        (True, 1, "w: bool True became int 1"),
        (0.1, math.nextafter(0.1, 1.0), "w: 0.1 became 0.1"),
        (NAN, 1.0, "w: nan became 1.0"),
        ("x", None, "w: 'x' became None"),
        (["a", "b", "c"], ["a", "c", "b"], "w[1]: of 3 and 3 lines"),
        (["a"], ["a", "b"], "- (the end)"),
    ],
)
def test_differing_values_are_named(expected: Any, actual: Any, line: str) -> None:
    found = list(differences(expected, actual, "w"))
    assert len(found) == 1
    assert line in found[0]


def test_ignored_places_do_not_count() -> None:
    expected, actual = {"time": 1.0, "value": 1.0}, {"time": 2.0, "value": 1.0}
    assert_same(expected, actual, "title", ignore=["time"])
    with pytest.raises(
        AssertionError, match=r"title: Equipoise differs from Lightning in 1 places\n  time: 1.0 became 2.0"
    ):
        assert_same(expected, actual, "title", ignore=["value"])


class Flawed(Callback):
    """Changes one weight by the smallest amount there is, draws a number too many, logs a value, and leaves a mode."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.log("more", 1.0)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        weight = pl_module.net[0].weight.data.view(-1)
        weight[3] = torch.nextafter(weight[3], torch.tensor(9.0))
        torch.rand(1)
        pl_module.net[2].eval()


class Fail(Callback):
    """Raises where Lightning does not."""

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        raise ArithmeticError("not in Lightning")


@pytest.mark.parametrize("run", ["plain", "watched"])
def test_a_flaw_in_one_of_the_two_runs_is_found_out(run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trainer(**options: Any) -> Any:
        return (flawed(Flawed) if watched(options) == (run == "watched") else L.Trainer)(**options)

    monkeypatch.setattr(equipoise, "Trainer", trainer)
    with pytest.raises(AssertionError, match=rf"flawed \({run}\): Equipoise differs from Lightning") as caught:
        check(Case(name="flawed"), tmp_path)
    for place in ("weights", "generators", "files", "modes", "metrics"):
        assert f"\n  {place}" in str(caught.value)


def flawed(flaw: type[Callback]) -> Any:
    """Lightning's trainer with one flaw."""
    return lambda **options: L.Trainer(**{**options, "callbacks": [flaw(), *options["callbacks"]]})


def test_an_error_that_lightning_does_not_raise_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equipoise, "Trainer", flawed(Fail))
    with pytest.raises(ArithmeticError, match="not in Lightning"):
        check(Case(name="failing"), tmp_path)


def test_a_missing_error_is_found_out(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="Lightning did not raise"):
        check(Case(name="peaceful", raises=ArithmeticError), tmp_path)


def watched(options: Any) -> bool:
    """Return True if a trainer with these options is watched."""
    return any(type(callback).__name__ == "Watcher" for callback in options["callbacks"])


class Swapped(Classifier):
    """Under the second trainer, fires one hook where another belongs."""

    def on_train_epoch_start(self) -> None:
        if Swapped.twice:
            self.on_before_zero_grad(self.trainer.optimizers[0])
        Swapped.twice = True

    twice = False


def test_another_order_of_hooks_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Swapped, "twice", False)
    with pytest.raises(AssertionError, match=r"swapped \(watched\)[^-]*hooks[\s\S]*\+ module.on_before_zero_grad"):
        check(Case(name="swapped", module=Swapped, options={"max_epochs": 1}), tmp_path)


def test_a_case_that_proves_nothing_is_found_out(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="does not do what the case is about"):
        check(Case(name="vacuous", proves=lambda record: record["counters"]["global_step"] == 99), tmp_path)
