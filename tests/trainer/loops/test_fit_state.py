"""State that outlives an epoch: positions, waits, and what another process receives."""

import math
import pickle
from typing import Any

import pytest

from equipoise.parallel.batches.weighting import AccumulationWindow
from equipoise.trainer.loops.fit_state import FitState
from equipoise.trainer.state.progress import FitProgress


@pytest.mark.parametrize(
    ("ready", "is_last", "max_batches", "done"),
    [
        (2, False, 3, False),
        (3, False, 3, True),
        (2, True, 3, True),
        (2, False, math.inf, False),
        (2, True, math.inf, True),
    ],
)
def test_batches_done(ready: int, is_last: bool, max_batches: float, done: bool) -> None:
    fit = FitState(FitProgress())
    fit.data.set_max_batches(max_batches)
    fit.progress.batch.current.set(ready)
    fit.progress.batch.mark_last(is_last)
    assert fit.batches_done() is done


def test_a_wait_is_new_once() -> None:
    fit = FitState(FitProgress())
    assert [fit.note_wait() for _ in range(3)] == [True, False, False]


def test_a_position_restores_window_and_end() -> None:
    window = AccumulationWindow(parts=3)
    window.add(4)
    fit = FitState(FitProgress())
    fit.load_position({"window": window.state_dict(), "has_ended": True})
    assert fit.window.is_open
    assert fit.has_ended
    fit.load_position({"window": AccumulationWindow().state_dict()})
    assert not fit.window.is_open
    assert not fit.has_ended


class Stateful:
    """A loader with a state."""

    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Flat:
    """Loaders, as far as their states are read."""

    def __init__(self, *flat: Any) -> None:
        self.flat = list(flat)


def test_states_of_loaders_stand_in_the_entry_of_the_loop() -> None:
    fit = FitState(FitProgress())
    assert fit.state_dict()["state_dict"] == {}
    fit.data.loaders = Flat([1, 2], Stateful(3), Stateful(5))  # type: ignore[assignment]
    assert fit.state_dict()["state_dict"] == {"combined_loader": [{"position": 3}, {"position": 5}]}


def test_another_process_receives_neither_loaders_nor_streams() -> None:
    fit = FitState(FitProgress())
    fit.data.loaders = Flat(lambda: None)  # type: ignore[assignment]
    fit.data.stream = iter([])  # type: ignore[assignment]
    fit.data.max_batches = 7
    fit.progress.epoch.current.set(2)
    copy = pickle.loads(pickle.dumps(fit))
    assert copy.data.loaders is None
    assert copy.data.stream is None
    assert copy.data.max_batches == 7
    assert copy.progress.epoch.current.completed == 2
