"""Rounds whose trials fail."""

from pathlib import Path
from typing import Any

import pytest

from equipoise.errors import ConfigurationError, StepError
from equipoise.extensions.common.bench import Bench
from equipoise.extensions.timing.tune import rounds as rounds_module
from equipoise.extensions.timing.tune.candidates import Candidate
from equipoise.extensions.timing.tune.results import best_of
from equipoise.extensions.timing.tune.rounds import Rounds
from tests.support.callback_runs import Clock


def rounds_in(folder: Path, monkeypatch: pytest.MonkeyPatch, *, last_base: int) -> Rounds:
    """Return rounds in which the run as it is fails after so many trials; a candidate is twice as fast."""
    monkeypatch.setattr(rounds_module, "perf_counter", Clock())
    rounds = Rounds(lambda overrides: {}, Bench(folder, []), 60.0)
    rounds.first = {"seconds": 1.0, "steps": 100}
    seconds_of_base = iter([2.0] * last_base)

    def run(candidate: Candidate, window: Any) -> dict[str, Any]:
        seconds = 1.0 if candidate.overrides else next(seconds_of_base, None)
        if seconds is None:
            raise ConfigurationError("killed")
        return {"seconds": seconds, "steps": 100, "shares": {}}

    monkeypatch.setattr(rounds, "_run", run)
    return rounds


def test_the_run_as_it_is_fails_in_a_later_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = rounds_in(tmp_path, monkeypatch, last_base=1)
    rounds.measure([Candidate(("a=1",))])
    assert [len(row.step_seconds) for row in rounds.rows] == [1, 1]
    assert best_of(rounds.rows).speeds(rounds.rows[0]) == [2.0]
    # Steps of 10 ms take half of the minute for three rounds of two trials; the starts of trials take the other half.
    assert rounds.steps == 500


def test_the_run_as_it_is_fails_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = rounds_in(tmp_path, monkeypatch, last_base=0)
    with pytest.raises(StepError, match="fails when it is started once more: killed"):
        rounds.measure([Candidate(("a=1",))])
