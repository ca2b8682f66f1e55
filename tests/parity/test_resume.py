"""Checkpoints in both directions: saved by one trainer, resumed by the other, equal to a run never interrupted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, LearningRateMonitor, ModelCheckpoint

from . import data
from .comparison import assert_same
from .harness import Record
from .modules import Classifier, with_optimizers
from .resumption import (
    FINAL,
    WHOLE,
    Manual,
    Remembers,
    Scenario,
    StatefulData,
    by_epoch,
    by_plateau,
    by_step,
    every_epoch,
    every_two_steps,
    every_validation,
    longer,
    resumable,
    resume,
    run,
    scenario,
)


def early_stopping() -> EarlyStopping:
    return EarlyStopping("val_loss", mode="max", patience=3)


def last() -> Any:
    return [ModelCheckpoint("kept", "{epoch}", save_last=True)]


SCENARIOS = [
    scenario("epoch-end", "epoch=0.ckpt"),
    scenario("epoch-end-later", "epoch=1.ckpt", module=with_optimizers(by_step)),
    scenario("epoch-end-scheduled", "epoch=0.ckpt", module=with_optimizers(by_epoch)),
    scenario("epoch-end-accumulated", "epoch=0.ckpt", options={"max_epochs": 3, "accumulate_grad_batches": 3}),
    # Lightning leaves a plateau scheduler out in the epoch it resumes.
    scenario(
        "epoch-end-plateau", "epoch=1.ckpt", exact=False, module=with_optimizers(by_plateau), options={"max_epochs": 4}
    ),
    # Lightning loads the weights before it makes them double, and so rounds them.
    scenario("epoch-end-double", "epoch=0.ckpt", exact=False, options={"max_epochs": 2, "precision": "64-true"}),
    scenario("epoch-end-half", "epoch=0.ckpt", options={"max_epochs": 2, "precision": "bf16-mixed"}),
    scenario("epoch-end-manual", "epoch=0.ckpt", module=Manual),
    scenario("epoch-end-batch-norm", "epoch=0.ckpt", module=lambda: Classifier(batch_norm=True)),
    scenario("epoch-end-without-validation", "epoch=0.ckpt", data=lambda: {"train_dataloaders": data.loader(4)}),
    scenario("epoch-end-unsized", "epoch=0.ckpt", data=data.unsized),
    scenario(
        "epoch-end-validating-inside",
        "epoch=0.ckpt",
        options={"max_epochs": 3, "val_check_interval": 3},
        callbacks=every_epoch(),
    ),
    scenario(
        "epoch-end-callbacks",
        "epoch=1.ckpt",
        callbacks=every_epoch(early_stopping, LearningRateMonitor),
        options={"max_epochs": 4},
    ),
    scenario("epoch-end-ema", "epoch=0.ckpt", callbacks=every_epoch(lambda: EMAWeightAveraging(decay=0.7))),
    scenario("epoch-end-data-module", "epoch=0.ckpt", data=lambda: {"datamodule": StatefulData()}),
    scenario("epoch-end-own-contents", "epoch=1.ckpt", module=Remembers),
    scenario("last", "last.ckpt", total_epochs=4, callbacks=last),
    scenario("longer-than-planned", "epoch=2.ckpt", total_epochs=5, module=with_optimizers(by_epoch)),
    scenario("mid-epoch", "step=4.ckpt", data=resumable, callbacks=every_two_steps),
    scenario(
        "mid-epoch-later", "step=8.ckpt", data=resumable, callbacks=every_two_steps, module=with_optimizers(by_step)
    ),
    scenario(
        "mid-epoch-plateau",
        "step=8.ckpt",
        exact=False,
        data=resumable,
        callbacks=every_two_steps,
        module=with_optimizers(by_plateau),
    ),
    # Lightning leaves out what remained of the epoch: its validation and its last hooks.
    scenario("mid-epoch-last-batch", "step=6.ckpt", alike=False, data=resumable, callbacks=every_two_steps),
    scenario(
        "mid-epoch-accumulated",
        "step=2.ckpt",
        data=resumable,
        callbacks=every_two_steps,
        options={"max_epochs": 2, "accumulate_grad_batches": 2},
    ),
    scenario("mid-epoch-manual", "step=4.ckpt", data=resumable, callbacks=every_two_steps, module=Manual),
    scenario(
        "mid-epoch-max-steps",
        "step=8.ckpt",
        data=resumable,
        callbacks=every_two_steps,
        options={"max_epochs": -1, "max_steps": 15},
    ),
    scenario(
        "mid-epoch-after-validation",
        "step=3.ckpt",
        data=resumable,
        callbacks=every_validation,
        options={"max_epochs": 2, "val_check_interval": 3},
    ),
]

PAIRS = [("lightning", "equipoise"), ("equipoise", "lightning"), ("equipoise", "equipoise")]
RUNS = [(plan, *pair) for plan in SCENARIOS for pair in PAIRS]
EXACT = [entry for entry in RUNS if entry[0].exact or entry[1:] == ("equipoise", "equipoise")]
ALIKE = [
    entry
    for entry in RUNS
    if entry[2] == "lightning" or (entry[1] == "lightning" and entry[0].exact and entry[0].alike)
]
ARGUMENTS = ("plan", "saver", "resumer")


def ids(runs: list[tuple[Scenario, str, str]]) -> list[str]:
    return [f"{plan}-{saver}-to-{resumer}" for plan, saver, resumer in runs]


@pytest.fixture(scope="module")
def lightnings(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Scenario, bool], Record]:
    """Lightning's own run of a scenario, resumed or never interrupted; made once."""
    made: dict[tuple[str, bool], Record] = {}

    def record(plan: Scenario, resumed: bool) -> Record:
        key = (str(plan), resumed)
        if key not in made:
            root = tmp_path_factory.mktemp("expected")
            made[key] = (
                resume(plan, "lightning", "lightning", root, True)
                if resumed
                else run(longer(plan), "lightning", root / "run")
            )
        return made[key]

    return record


@pytest.mark.parametrize(ARGUMENTS, EXACT, ids=ids(EXACT))
def test_resumed_run_equals_an_uninterrupted_one(
    plan: Scenario, saver: str, resumer: str, lightnings: Any, tmp_path: Path
) -> None:
    expected, actual = lightnings(plan, False), resume(plan, saver, resumer, tmp_path)
    names = WHOLE if saver == resumer == "equipoise" else FINAL
    title = f"{plan}, saved by {saver}, resumed by {resumer}"
    assert_same({name: expected[name] for name in names}, {name: actual[name] for name in names}, title)


@pytest.mark.parametrize(ARGUMENTS, ALIKE, ids=ids(ALIKE))
def test_resumed_run_is_lightnings_in_all_else(
    plan: Scenario, saver: str, resumer: str, lightnings: Any, tmp_path: Path
) -> None:
    """Hooks, tables, metrics, and the loops' counters in a last checkpoint, against Lightning after Lightning."""
    expected, actual = lightnings(plan, True), resume(plan, saver, resumer, tmp_path, watched=True)
    assert_same(expected, actual, f"{plan}, saved by {saver}, resumed by {resumer}")
