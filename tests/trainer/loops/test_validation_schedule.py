"""Validation by the clock; `tests/parity/runs/test_validation.py` compares all other intervals with Lightning's."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from equipoise.trainer.loops import fit_state, validation_schedule
from tests.support.trainer_runs import Validated, loader, trainer


class Timed(Validated):
    """Notes the steps after which it is validated.

    Args:
        clock: Has the seconds `now`, of which a step takes 25.
    """

    def __init__(self, clock: Any) -> None:
        super().__init__()
        self.clock = clock
        self.validated: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.clock.now += 25.0
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.validated.append(self.global_step)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Timed:
    """A module with the clock that runs look at."""
    clock = SimpleNamespace(now=100.0)
    for file in (fit_state, validation_schedule):
        monkeypatch.setattr(file, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return Timed(clock)


def test_the_time_begins_anew_with_each_validation(module: Timed) -> None:
    run = trainer(max_epochs=2, val_check_interval=timedelta(seconds=50), num_sanity_val_steps=0)
    run.fit(module, loader(5), loader(1))
    assert module.validated == [2, 4, 6, 8, 10]


def test_all_processes_follow_the_clock_of_the_first(module: Timed, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainer(val_check_interval=timedelta(days=1), num_sanity_val_steps=0)
    processes = run.connected_strategy.processes
    monkeypatch.setattr(processes, "broadcast", lambda value, *_: True if value is False else value)
    run.fit(module, loader(3), loader(1))
    assert module.validated == [1, 2, 3]
