"""The harness itself: it finds a flaw in one of two runs, whatever kind it is, and says where."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback

import equipoise

from .harness import Case, check
from .modules import Classifier


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
    with pytest.raises(AssertionError, match=rf"flawed \({run}\): Equipoise and Lightning differ") as caught:
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
