"""Runs a case under both trainers and compares everything the two runs leave behind.

A case is a small record: how to make the module, the data and the callbacks, the trainer's arguments, and what to call.
It runs twice under Equipoise: plain, as a user would write it, and watched, with every hook of the module, the data
module and two callbacks written down. Under Lightning it runs once, watched: both runs are held against that one, so a
case in which watching changes a result fails as well.
"""

import contextlib
import os
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

import equipoise
from tests.support.equality import assert_equal

from . import data, modules
from .outputs import plain, read_folder
from .recording import Watch

__all__ = ["Case", "Record", "check", "column", "columns", "execute", "fit", "parity"]

Record = dict[str, Any]
SEED = 7
AFTER_ERRORS = ("generators", "metrics")
"""Sections that say nothing once a run has failed: how much was drawn and computed before the error was noticed."""
DEFAULTS = {
    "accelerator": "cpu",
    "devices": 1,
    "max_epochs": 2,
    "log_every_n_steps": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def fit(trainer: Any, module: Any, given: Mapping[str, Any]) -> Any:
    """Trains on the loaders or the data module of a case."""
    return trainer.fit(module, **given)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One program to be run under both trainers.

    Attributes:
        name: What the case is about.
        module: Makes the module. Called after seeding.
        data: Makes the loaders or the data module, as the arguments of `fit`.
        options: The trainer's arguments, beside the defaults of all cases.
        callbacks: Makes the callbacks.
        logger: Makes the logger, or the loggers, from the run's folder.
        run: Calls the trainer's entry points; what it returns is compared.
        observe: What else to compare after the run, from the trainer.
        raises: The exception Lightning raises; Equipoise must raise the same or one derived from it.
        refuses: What Equipoise raises, where it has an error of its own, derived from Lightning's as well. It may do so
            earlier than Lightning, so nothing else is compared then.
        proves: Must hold for Lightning's record, so that a case cannot pass without doing what its name says.
        ignore: Fragments of places whose values are wall-clock readings or the like.
        watch: Whether the case can be watched; if not, it runs plain under both trainers.
    """

    name: str
    module: Callable[[], Any] = modules.Classifier
    data: Callable[[], Mapping[str, Any]] = data.sized
    options: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], Sequence[Any]] = tuple
    logger: Callable[[Path], Any] = lambda root: CSVLogger(root, name="csv", version=0)
    run: Callable[[Any, Any, Mapping[str, Any]], Any] = fit
    observe: Callable[[Any], Any] | None = None
    raises: type[BaseException] | None = None
    refuses: type[BaseException] | None = None
    proves: Callable[[Record], bool] | None = None
    ignore: Sequence[str] = ()
    watch: bool = True

    def __str__(self) -> str:
        return self.name


def parity(cases: Sequence[Case]) -> Callable[[Case, Path], None]:
    """Return a test of every case; a quarter of the cases is quick."""
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), f"two cases have one name: {sorted(names)}"

    @pytest.mark.quick_cases(-(-len(cases) // 4))
    @pytest.mark.parametrize("case", cases, ids=str)
    def test(case: Case, tmp_path: Path) -> None:
        check(case, tmp_path)

    return test


TABLE = "csv/version_0/metrics.csv"


def columns(record: Record) -> set[str]:
    """The names in a run's table."""
    return set(record["files"][TABLE][0].split(","))


def column(record: Record, name: str) -> list[float]:
    """The values that a run's table holds under a name."""
    header, *rows = [line.split(",") for line in record["files"][TABLE]]
    index = header.index(name)
    return [float(row[index]) for row in rows if row[index]]


def check(case: Case, folder: Path) -> None:
    """Runs a case under both trainers and compares."""
    theirs = execute(case, L.Trainer, folder / "lightning", case.watch)
    if theirs["raised"] is not None and not (case.raises and isinstance(theirs["raised"], case.raises)):
        raise theirs["raised"]
    assert (theirs["raised"] is None) == (case.raises is None), f"{case.name}: Lightning did not raise {case.raises}."
    if case.proves is not None:
        assert case.proves(theirs), f"{case.name}: the run under Lightning does not do what the case is about."
    ours = execute(case, equipoise.Trainer, folder / "plain")
    _compare(case, {**theirs, "hooks": []}, ours, f"{case.name} (plain)")
    if case.watch:
        ours = execute(case, equipoise.Trainer, folder / "watched", True)
        _compare(case, theirs, ours, f"{case.name} (watched)")


def _compare(case: Case, theirs: Record, ours: Record, title: str) -> None:
    expected, actual = theirs["raised"], ours["raised"]
    if expected is None and actual is not None:
        raise actual
    if expected is not None:
        for kind in (type(expected), case.refuses or type(expected)):  # `except` of a program for Lightning catches it
            assert isinstance(actual, kind), f"{title}: Lightning raised {expected!r}, Equipoise {actual!r}."
    if case.refuses is None:
        ignore = [*case.ignore, *(AFTER_ERRORS if expected is not None else ())]
        assert_equal(
            {**theirs, "raised": None},
            {**ours, "raised": None},
            title=f"{title}: Equipoise and Lightning",
            ignore=ignore,
        )


def execute(case: Case, trainer_class: Callable[..., Any], root: Path, watched: bool = False) -> Record:
    """Runs a case under one trainer and returns what it left behind, section by section."""
    root.mkdir(parents=True)
    record: Record = {"raised": None, "returned": None}
    watch = Watch() if watched else None
    with contextlib.chdir(root), warnings.catch_warnings(), mock.patch.dict(os.environ):
        warnings.simplefilter("ignore")
        L.seed_everything(SEED, verbose=False)
        trainer = module = None
        try:
            module, given = case.module(), case.data()
            callbacks = list(case.callbacks())
            if watch is not None:
                callbacks = _watch(watch, module, given, callbacks)
            trainer = trainer_class(
                **{
                    **DEFAULTS,
                    "default_root_dir": root,
                    "logger": case.logger(root),
                    "callbacks": callbacks,
                    **case.options,
                }
            )
            if watch is not None:
                watch.trainer = trainer
            record["returned"] = plain(case.run(trainer, module, given), root)
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            record["raised"] = error
        record["hooks"] = [line.replace(str(root), "<root>") for line in watch.lines] if watch else []
        record |= _aftermath(case, trainer, module, root)
    return record


def _watch(watch: Watch, module: Any, given: Mapping[str, Any], callbacks: list[Any]) -> list[Any]:
    watch.module(module)
    if "datamodule" in given:
        watch.datamodule(given["datamodule"])
    return [watch.callback("first"), *callbacks, watch.callback("last")]


def _aftermath(case: Case, trainer: Any, module: Any, root: Path) -> Record:
    """Everything that can be read once a run is over."""
    record: Record = {"generators": _generators(), "files": read_folder(root)}
    if isinstance(module, torch.nn.Module):
        record["weights"] = plain(dict(module.state_dict()), root)
        record["modes"] = {name: part.training for name, part in module.named_modules()}
    if trainer is not None:
        record |= _trainer_state(trainer, root)
        record["observed"] = plain(case.observe(trainer), root) if case.observe else None
    return record


def _trainer_state(trainer: Any, root: Path) -> Record:
    schedulers = [plain(config.scheduler.state_dict(), root) for config in trainer.lr_scheduler_configs]
    optimizers = [plain(optimizer.state_dict(), root) for optimizer in trainer.optimizers]
    counters = (
        "global_step",
        "current_epoch",
        "should_stop",
        "num_training_batches",
        "num_val_batches",
        "num_test_batches",
    )
    metrics = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
    return {
        "counters": {name: getattr(trainer, name) for name in counters},
        "metrics": {name: plain(dict(getattr(trainer, name)), root) for name in metrics},
        "optimizers": optimizers,
        "schedulers": schedulers,
    }


def _generators() -> dict[str, Any]:
    """The state of every random generator: an extra or a missing draw shows here."""
    numpy_state: Tensor = torch.from_numpy(np.random.get_state()[1].astype(np.int64))
    return {"torch": torch.get_rng_state(), "python": hash(random.getstate()), "numpy": numpy_state}
