"""OptunaPruning: rank 0 decides, all processes end together, and the trial is that of the process that called fit."""

import copy
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from equipoise import OptunaPruning, Trainer
from tests.support.quiet import QUIET
from tests.support.trainer_runs import refuses

DEVICES = pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu"]], ids=["one", "ddp"])


@pytest.fixture(autouse=True)
def pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Exception]:
    """Return the error of Optuna; without Optuna, that of a package with this error and nothing else."""
    if importlib.util.find_spec("optuna") is None:
        (tmp_path / "packages").mkdir()
        (tmp_path / "packages" / "optuna.py").write_text("class TrialPruned(Exception):\n    pass\n")
        monkeypatch.syspath_prepend(tmp_path / "packages")
        # It is imported below, and forgotten with the patch.
        monkeypatch.setitem(sys.modules, "optuna", None)
        del sys.modules["optuna"]
    import optuna

    return optuna.TrialPruned


class Trial:
    """Prunes at a step. Only the process that made it may ask it."""

    def __init__(self, prunes_at: int | None = None) -> None:
        self.prunes_at = prunes_at
        self.process = os.getpid()
        self.reports: list[tuple[float, int]] = []

    def report(self, value: float, step: int) -> None:
        assert os.getpid() == self.process
        self.reports.append((value, step))

    def should_prune(self) -> bool:
        return self.reports[-1][1] == self.prunes_at


class Scalar(L.LightningModule):
    """Steps w by -lr, and logs it: w - 1 in rank 0 and w + 1 in rank 1. Notes the epochs that each process begins."""

    def __init__(self, folder: Path, lr: float = 0.5) -> None:
        super().__init__()
        self.folder, self.lr = folder, lr
        self.w = torch.nn.Parameter(torch.tensor(4.0, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.w * 1.0

    def on_train_epoch_start(self) -> None:
        with (self.folder / f"epochs_{self.global_rank}").open("a") as file:
            file.write(f"{self.current_epoch} ")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        shift = self.global_rank * 2 - 1 if self.trainer.world_size == 2 else 0
        self.log("val_loss", self.w + shift)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def fitted(module: Scalar, trial: Any, devices: list[str], **options: Any) -> tuple[Trainer, OptunaPruning]:
    """Fit for five epochs of one step, after a sanity check; return trainer and callback, also for a fit that ends."""
    pruning = OptunaPruning(trial)
    settings = {**QUIET, "num_sanity_val_steps": 1, "max_epochs": 5, "accelerator": "cpu", **options}
    trainer = Trainer(devices=devices, strategy="ddp" if devices[1:] else "auto", callbacks=[pruning], **settings)
    loader = DataLoader(TensorDataset(torch.zeros(2, 1)), batch_size=2 // len(devices))
    trainer.fit(module, loader, loader)
    return trainer, pruning


@DEVICES
def test_all_processes_end_after_the_validation_that_prunes(devices, tmp_path, pruned):
    trial = Trial(prunes_at=2)
    with pytest.raises(pruned, match=r"Pruned after 3 validations, at val_loss=2\.5"):
        fitted(Scalar(tmp_path), trial, devices)
    assert trial.reports == [(3.5, 0), (3.0, 1), (2.5, 2)]
    assert [path.read_text() for path in tmp_path.glob("epochs_*")] == ["0 1 2 "] * len(devices)


@DEVICES
def test_a_trial_that_is_not_pruned_stays_with_its_callback_and_the_next_fit_counts_from_zero(devices, tmp_path):
    """A copy of the callback has no trial, and leaves the trial to the original."""
    trial, module, loader = Trial(), Scalar(tmp_path), DataLoader(torch.zeros(1, 1))
    trainer, pruning = fitted(module, trial, devices, max_epochs=2)
    trainer.validate(module, DataLoader(torch.zeros(2, 1)))
    assert [step for _, step in trial.reports] == [0, 1]
    assert copy.deepcopy(pruning).trial is None
    again = Trainer(**{**QUIET, "max_epochs": 2, "accelerator": "cpu"}, callbacks=[pruning])
    again.fit(Scalar(tmp_path), loader, loader)
    assert [step for _, step in trial.reports] == [0, 1, 0, 1]
    assert pruning.trial is trial


def test_a_fit_that_continues_counts_on(tmp_path):
    first, second = Trial(), Trial()
    trainer, _ = fitted(Scalar(tmp_path), first, ["cpu"], max_epochs=2)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    again = OptunaPruning(second)
    loader = DataLoader(torch.zeros(1, 1))
    further = Trainer(**{**QUIET, "max_epochs": 3, "accelerator": "cpu"}, callbacks=[again])
    further.fit(Scalar(tmp_path), loader, loader, ckpt_path=tmp_path / "two.ckpt")
    assert first.reports + second.reports == [(3.5, 0), (3.0, 1), (2.5, 2)]


@DEVICES
def test_an_error_of_the_trial_is_that_of_the_fit(devices, tmp_path):
    class Refusing(Trial):
        def report(self, value: float, step: int) -> None:
            raise NotImplementedError("several objectives")

    with pytest.raises(NotImplementedError, match="several objectives"):
        fitted(Scalar(tmp_path), Refusing(), devices)


def test_arguments_that_are_refused(tmp_path, monkeypatch):
    refuses(lambda: fitted(Scalar(tmp_path), None, ["cpu"]), "needs the trial in the process of rank 0")
    refuses(lambda: OptunaPruning("trial"), "a trial of Optuna", "not 'trial'")
    monkeypatch.setitem(sys.modules, "optuna", None)
    refuses(lambda: OptunaPruning(Trial()), "needs optuna, which is not installed: pip install optuna")


def test_a_value_that_was_not_logged_is_refused(tmp_path):
    trainer = Trainer(**{**QUIET, "max_epochs": 1, "accelerator": "cpu"}, callbacks=[OptunaPruning(Trial(), "val_los")])
    loader = DataLoader(torch.zeros(1, 1))
    with pytest.raises(Exception, match="reports 'val_los', which was not logged: there are val_loss"):
        trainer.fit(Scalar(tmp_path), loader, loader)


@DEVICES
def test_a_study_of_optuna_prunes_the_worse_trial(devices, tmp_path, pruned):
    """The second trial is worse than the first at each step, so the median of one trial prunes it at the first."""
    import optuna

    if not hasattr(optuna, "create_study"):
        pytest.skip("Optuna is not installed")
    optuna.logging.set_verbosity(optuna.logging.ERROR)

    def objective(trial: Any) -> float:
        trainer, _ = fitted(Scalar(tmp_path, trial.suggest_float("lr", 0, 1)), trial, devices)
        return trainer.callback_metrics["val_loss"].item()

    study = optuna.create_study(pruner=optuna.pruners.MedianPruner(n_startup_trials=1))
    study.enqueue_trial({"lr": 0.5})
    study.enqueue_trial({"lr": 0.25})
    study.optimize(objective, n_trials=2)
    good, bad = study.trials
    assert (good.state.name, good.value) == ("COMPLETE", 1.5)
    assert good.intermediate_values == {0: 3.5, 1: 3.0, 2: 2.5, 3: 2.0, 4: 1.5}
    assert (bad.state.name, bad.intermediate_values) == ("PRUNED", {0: 3.75})
