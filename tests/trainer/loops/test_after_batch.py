"""Work after a batch: values of steps, validation, schedulers and ends."""

from types import SimpleNamespace
from typing import Any

import pytest

from equipoise.trainer.loops.after_batch import AfterBatch
from equipoise.trainer.loops.fit_state import FitState
from tests.support.contexts import training_context
from tests.support.trainer_runs import Validated, loader


class Loop:
    """AfterBatch of an epoch of four batches, and what it called.

    Attributes:
        logged: Numbers of steps whose values went to the listeners.
        validated: Whether each validation followed the end of a window.
        watching: Indices of batches after which schedulers that watch a value were stepped.
    """

    def __init__(self, **settings: Any) -> None:
        self.logged: list[int] = []
        self.validated: list[bool] = []
        self.watching: list[int] = []
        module = Validated()
        loaders = {"train": loader(4), "val": loader(1)}
        context = training_context(module, None, loaders, enable_model_summary=False, **settings)
        self.state = context.state
        self.state.metric_listeners = [lambda trainer, values, step: self.logged.append(step)]
        self.state.lr_scheduler_configs = [SimpleNamespace()]  # type: ignore[list-item]
        self.fit = FitState(context.state.progress)
        self.fit.data.max_batches = 4
        self.fit.schedule_validation(4)
        context.logs.enter(self.fit.collection)
        context.logs.step_metrics = lambda: {"loss": 1.0}  # type: ignore[method-assign]
        schedulers: Any = SimpleNamespace(after_validation=self.watching.append)
        self.after_batch = AfterBatch(context, self.fit, schedulers, self.validated.append)

    def run(self, batches: int = 4, window: int = 1) -> list[bool]:
        """Return for each batch whether the epoch ends with it."""
        ends_at = []
        for index in range(batches):
            self.fit.progress.batch.current.set(index + 1)
            self.fit.progress.batch.mark_last(index == 3)
            ends = index == 3
            ends_at.append(self.after_batch(index, ends or (index + 1) % window == 0, ends))
        return ends_at


def test_values_of_every_other_step_are_logged() -> None:
    loop = Loop(log_every_n_steps=2, max_epochs=1)
    assert loop.run() == [False, False, False, True]
    # A listener receives the number of steps before the present one.
    assert loop.logged == [1, 3]


def test_only_the_end_of_a_window_is_a_step() -> None:
    loop = Loop(log_every_n_steps=1, max_epochs=1)
    loop.run(window=2)
    assert loop.logged == [0, 1]
    assert loop.watching == [1, 3]
    assert loop.fit.progress.batches_that_stepped == 2


def test_validation_knows_whether_the_window_has_ended() -> None:
    loop = Loop(max_epochs=1)
    loop.fit.schedule_validation(3)
    loop.run(batches=3, window=2)
    assert loop.validated == [False]
    loop = Loop(max_epochs=1)
    loop.run()
    assert loop.validated == [True]


def test_a_resumed_batch_neither_logs_nor_validates_again() -> None:
    loop = Loop(log_every_n_steps=1, max_epochs=1)
    loop.fit.progress.batch.current.set(4)
    loop.fit.progress.batch.mark_last(True)
    assert loop.after_batch(3, True, True, write=False, validate=False)
    assert loop.logged == []
    assert loop.validated == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"max_epochs": 1}, [False, False, False, True]),
        ({"max_epochs": 1, "min_epochs": 1}, [False, False, False, True]),
        ({"max_epochs": 1, "max_steps": 0}, [True] * 4),
    ],
)
def test_the_epoch_ends(settings: dict[str, Any], expected: list[bool]) -> None:
    assert Loop(**settings).run() == expected


def test_a_request_to_stop_ends_the_epoch_unless_it_must_wait() -> None:
    loop = Loop(max_epochs=2, min_epochs=0)
    loop.state.should_stop = True
    assert loop.run(batches=1) == [True]
    waits = Loop(max_epochs=2, min_epochs=1)
    waits.state.should_stop = True
    assert waits.run(batches=1) == [False]
