"""When validation runs: a table of intervals and batches."""

import math
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest

from equipoise.trainer.loops import fit_state
from equipoise.trainer.loops.fit_state import FitState
from equipoise.trainer.loops.stopping import Stopping
from equipoise.trainer.loops.validation_schedule import ValidationSchedule
from equipoise.trainer.state.run_state import RunState


class Reads(L.LightningModule):
    """Its loop reads the batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any: ...


class Pulls(L.LightningModule):
    """It pulls its batches by itself."""

    def training_step(self, dataloader_iter: Any) -> Any: ...


def schedule(
    every: float | None, *, module: L.LightningModule | None = None, min_epochs: int = 0, **settings: Any
) -> ValidationSchedule:
    """A schedule with this `val_check_batch`, and with these fields of the RunState."""
    state = RunState(min_epochs=min_epochs, **settings)
    processes = SimpleNamespace(broadcast=lambda value: value)
    context: Any = SimpleNamespace(
        state=state,
        global_step=0,
        module=module or Reads(),
        strategy=SimpleNamespace(processes=processes),
    )
    fit = FitState(state.progress)
    fit.schedule_validation(every)
    return ValidationSchedule(context, fit, Stopping(context, fit))


def validated_batches(table: ValidationSchedule, batches: int, epochs: int = 1, *, sized: bool = True) -> list[int]:
    """Indices of the batches after which validation runs; in each epoch they begin at 0 again."""
    progress = table.fit.progress
    due = []
    for _ in range(epochs):
        progress.begin_epoch()
        for index in range(batches):
            progress.batch.current.set(index + 1)
            progress.batch.mark_last(sized and index == batches - 1)
            if table.is_due(index):
                due.append(index)
    return due


@pytest.mark.parametrize(
    ("every", "settings", "due"),
    [
        # A number of batches, which begins anew in each epoch.
        (5, {}, [4, 4]),
        (2, {}, [1, 3, 1, 3]),
        (1, {}, [0, 1, 2, 3, 4] * 2),
        (6, {}, []),
        # The same, counted over epochs.
        (3, {"check_val_every_n_epoch": None}, [2, 0, 3]),
        (10, {"check_val_every_n_epoch": None}, [4]),
        # The end of the epoch.
        (math.inf, {}, [4, 4]),
        # Batches whose limit is known, and whose number is not.
        (math.inf, {"limit_train_batches": 5}, [4, 4]),
        # A request to stop, at once and only if training may end there.
        (5, {"should_stop": True}, [0, 1, 2, 3, 4] * 2),
        (5, {"should_stop": True, "min_epochs": 3}, [4, 4]),
    ],
)
def test_batches_of_two_epochs_of_five(every: float, settings: dict[str, Any], due: list[int]) -> None:
    assert validated_batches(schedule(every, **settings), batches=5, epochs=2) == due


def test_a_limit_ends_an_epoch_of_unknown_length() -> None:
    limited = schedule(math.inf, limit_train_batches=3)
    assert validated_batches(limited, batches=3, sized=False) == [2]
    unlimited = schedule(math.inf)
    assert validated_batches(unlimited, batches=3, sized=False) == []


def test_a_step_that_pulls_batches_is_validated_at_the_last_one() -> None:
    """Its steps are fewer than the batches, so the number of batches is never reached."""
    assert validated_batches(schedule(10, module=Pulls()), batches=4) == [3]
    assert validated_batches(schedule(10), batches=4) == []


def test_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(fit_state.time, "monotonic", lambda: clock.now)
    timed = schedule(None, val_check_seconds=60.0)
    assert not timed.is_due(0)
    clock.now = 159.9
    assert not timed.is_due(1)
    clock.now = 160.0
    assert timed.is_due(2)
    timed.fit.restart_clock()
    assert not timed.is_due(3)


def test_all_processes_follow_the_clock_of_the_first() -> None:
    timed = schedule(None, val_check_seconds=1e9)
    timed.strategy = SimpleNamespace(processes=SimpleNamespace(broadcast=lambda value: True))  # type: ignore[assignment]
    assert timed.is_due(0)
