"""Default callbacks, their order, and those of modules."""

from datetime import timedelta
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    OnExceptionCheckpoint,
    Timer,
    TQDMProgressBar,
)

from equipoise import ProgressBar, Trainer
from equipoise.tables.model_summary import WholeModelSummary
from equipoise.trainer.settings.callbacks import select_callbacks
from tests.support.trainer_runs import Small, loader, trainer


def kinds(callbacks: list[Any]) -> list[type]:
    return [type(callback) for callback in callbacks]


def chosen(callbacks: Any = None, **options: Any) -> list[Any]:
    defaults = {
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_time": None,
    }
    return select_callbacks(callbacks, **{**defaults, **options})


def test_our_bar_and_an_uncut_summary_are_the_defaults_unless_given() -> None:
    everything = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), True)
    assert kinds(chosen(**everything)) == [ProgressBar, WholeModelSummary, ModelCheckpoint]
    assert chosen() == []
    own = [ModelCheckpoint("x"), TQDMProgressBar(), ModelSummary(max_depth=2)]
    assert chosen(own, **everything) == [own[1], own[2], own[0]]


def test_checkpoint_callbacks_come_last() -> None:
    """They save what the others left."""
    callbacks = [ModelCheckpoint("a"), EarlyStopping("x"), OnExceptionCheckpoint("b"), LearningRateMonitor()]
    assert chosen(callbacks, enable_checkpointing=True) == [callbacks[1], callbacks[3], callbacks[0], callbacks[2]]


def test_max_time_brings_a_timer(caplog: pytest.LogCaptureFixture) -> None:
    (timer,) = chosen(max_time=timedelta(minutes=2))
    assert isinstance(timer, Timer)
    assert timer.time_remaining() == 120
    own = Timer("00:00:00:05")
    with caplog.at_level("INFO"):
        assert chosen([own], max_time="00:00:01:00") == [own]
    assert "max_time is left aside" in caplog.text


class First(L.Callback): ...


class Second(First): ...


MERGES: dict[str, tuple[list[Any], list[Any]]] = {
    "the same class": ([First(), EarlyStopping("x")], [EarlyStopping("y")]),
    "a subclass": ([First(), EarlyStopping("x")], [Second()]),
    "a base class": ([Second()], [First()]),
    "a checkpoint": ([ModelCheckpoint(), First()], [ModelCheckpoint("z"), Second()]),
}


@pytest.mark.parametrize("name", MERGES)
def test_callbacks_of_the_module_replace_ones_of_their_class(name: str) -> None:
    """As under Lightning, in the same order."""
    callbacks, of_module = MERGES[name]
    module = type("Module", (Small,), {"configure_callbacks": lambda self: of_module})()
    merged = []
    for cls in (L.Trainer, Trainer):
        run = trainer(cls, callbacks=list(callbacks), enable_checkpointing="checkpoint" in name, max_steps=0)
        run.fit(module, loader())
        merged.append(run.callbacks)
    assert merged[0] == merged[1]
