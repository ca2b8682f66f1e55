"""Checkpoints in both directions: saved by one trainer, resumed by the other, equal to a run never interrupted."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, LearningRateMonitor, ModelCheckpoint

from tests.support.equality import assert_equal

from ..harness import Record
from ..modules import with_optimizers
from ..resumption import (
    FINAL,
    TRAINERS,
    WHOLE,
    Manual,
    Scenario,
    StatefulData,
    assert_same_parts,
    by_epoch,
    by_plateau,
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
    # Lightning leaves a plateau scheduler out in the epoch it resumes.
    scenario(
        "epoch-end-plateau", "epoch=1.ckpt", exact=False, module=with_optimizers(by_plateau), options={"max_epochs": 4}
    ),
    # Lightning loads the weights before it makes them double, and so rounds them.
    scenario("epoch-end-double", "epoch=0.ckpt", exact=False, options={"max_epochs": 2, "precision": "64-true"}),
    scenario(
        "epoch-end-callbacks",
        "epoch=1.ckpt",
        callbacks=every_epoch(early_stopping, LearningRateMonitor),
        options={"max_epochs": 4},
    ),
    scenario("epoch-end-ema", "epoch=0.ckpt", callbacks=every_epoch(lambda: EMAWeightAveraging(decay=0.7))),
    scenario("epoch-end-data-module", "epoch=0.ckpt", data=lambda: {"datamodule": StatefulData()}),
    scenario("last", "last.ckpt", total_epochs=4, callbacks=last),
    scenario("longer-than-planned", "epoch=2.ckpt", total_epochs=5, module=with_optimizers(by_epoch)),
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
    # Lightning forgets the best files of the first run, which lie in another folder.
    scenario(
        "mid-epoch-after-validation-monitored",
        "step=3.ckpt",
        alike=False,
        data=resumable,
        callbacks=lambda: every_validation("val_loss"),
        options={"max_epochs": 2, "val_check_interval": 3},
    ),
]


@dataclass
class Runs:
    """All runs of a scenario, each made once.

    Attributes:
        plan: The scenario.
        folder: Where the runs lie.
    """

    plan: Scenario
    folder: Path

    def __post_init__(self) -> None:
        self.saving = {name: run(self.plan.case, name, self._saved(name)) for name in TRAINERS}
        self.uninterrupted = self.saving["lightning"]
        if self.plan.total_epochs is not None:
            self.uninterrupted = run(longer(self.plan), "lightning", self.folder / "uninterrupted")

    def resumed(self, saver: str, resumer: str, watched: bool = False) -> Record:
        """The run that resumes from the saver's checkpoint."""
        name = f"{saver}-to-{resumer}{'-watched' if watched else ''}"
        return resume(self.plan, self._saved(saver), resumer, self.folder / name, watched)

    def _saved(self, saver: str) -> Path:
        return self.folder / f"{saver}-saves"


@pytest.mark.quick_cases(4)
@pytest.mark.thorough
@pytest.mark.parametrize("plan", SCENARIOS, ids=str)
def test_a_resumed_run_equals_an_uninterrupted_one_and_lightnings(plan: Scenario, tmp_path: Path) -> None:
    """In hooks, tables, metrics and the counters of the loops."""
    runs = Runs(plan, tmp_path)
    expected = runs.resumed("lightning", "lightning", watched=True)
    title = f"{plan}, saved by equipoise"
    assert_same_parts(WHOLE, runs.uninterrupted, runs.resumed("equipoise", "equipoise"), f"{title} and resumed by it")
    lightnings = runs.resumed("equipoise", "lightning", watched=True)
    assert_equal(expected, lightnings, title=f"{title}, resumed by lightning")
    if plan.exact:
        assert_same_parts(FINAL, runs.uninterrupted, lightnings, f"{title}, resumed by lightning")
        title = f"{plan}, saved by lightning, resumed by equipoise"
        assert_same_parts(FINAL, runs.uninterrupted, runs.resumed("lightning", "equipoise"), title)
    if plan.exact and plan.alike:
        assert_equal(expected, runs.resumed("lightning", "equipoise", watched=True), title=f"{title} (watched)")
