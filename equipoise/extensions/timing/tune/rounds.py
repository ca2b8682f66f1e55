"""Rounds: the limit of a run found once, and its remedies measured beside it, in turn."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

from equipoise.errors import ConfigurationError, StepError
from equipoise.extensions.common.bench import Bench
from equipoise.extensions.timing.clock import FIRST_STEPS
from equipoise.extensions.timing.limits import Facts, Limit
from equipoise.extensions.timing.tune.candidates import Candidate
from equipoise.extensions.timing.tune.probe import Window
from equipoise.extensions.timing.tune.trial import as_trial, measure
from equipoise.parallel.workers.bounded_call import CallError

__all__ = ["Rounds", "Row"]

# A limit is named after a second.
_LEAST_SECONDS = 1.5
# The first trial takes these shares of the time: as a rule, until a validation was seen, and in any case.
_SHARE = 1 / 12
_PATIENCE = 1 / 4
_MOST = 1 / 2
# Steps with which a limit is found, and the fewest of a trial.
_LEAST_STEPS = 20
_ROUNDS = 3
# Differences of less are chance.
_LEAST_GAIN = 1.05

# Returns the configuration with overrides.
Compose = Callable[[Sequence[str]], Mapping[str, Any]]


@dataclass
class Row:
    """A candidate and its measurements.

    Attributes:
        candidate: The candidate; one without a change is the run as it is.
        step_seconds: The time of a step in each round.
        shares: The share of each part in the last round.
        reason: The reason why it was not measured; None if it was.
    """

    candidate: Candidate
    step_seconds: list[float] = field(default_factory=list)
    shares: Mapping[str, float] = field(default_factory=dict)
    reason: str | None = None

    @property
    def is_measured(self) -> bool:
        """True if it was measured in each round."""
        return self.reason is None and bool(self.step_seconds)

    def note(self, measured: Mapping[str, Any]) -> None:
        """Note the measurements of a round."""
        self.step_seconds.append(measured["seconds"] / measured["steps"])
        self.shares = measured["shares"]

    def speeds(self, base: "Row") -> list[float]:
        """Return for each round how many times as fast it is as the run as it is; empty if it was not measured."""
        if not self.is_measured:
            return []
        # A slow moment of the machine slows a whole round.
        pairs = zip(base.step_seconds, self.step_seconds, strict=True)
        return [base_seconds / seconds for base_seconds, seconds in pairs]

    def is_improvement(self, base: "Row") -> bool:
        """Return True if it is faster in each round, and by more than chance."""
        speeds = self.speeds(base)
        return bool(speeds) and min(speeds) > 1 and median(speeds) >= _LEAST_GAIN


class Rounds:
    """Runs the trials.

    Args:
        compose: Returns the configuration with further overrides.
        bench: Runs each in a process of its own.
        seconds: About how long the trials may take.

    Attributes:
        rows: The run as it is, then the candidates.
        steps: Number of steps that were timed in each trial.
        first: Measurements of the first trial: "seconds", "steps", "shares" and "device".
        facts: Facts on which remedies depend.
        limit: The limit of the run; None if there is none.
        left_out: Names of loggers that trials leave out.
    """

    def __init__(self, compose: Compose, bench: Bench, seconds: float) -> None:
        self.rows = [Row(Candidate())]
        self.steps = 0
        self.first: dict[str, Any] = {}
        self.facts = Facts()
        self.limit: Limit | None = None
        self.left_out: list[str] = []
        self._compose = compose
        self._bench = bench
        self._seconds = seconds
        self._begun = perf_counter()

    def find(self) -> None:
        """Find what limits the run.

        Raises:
            ConfigurationError: If the configuration is wrong, or there is too little time.
            StepError: If the user's program fails.
        """
        window = Window(
            first_steps=FIRST_STEPS,
            steps=_LEAST_STEPS,
            seconds=max(_LEAST_SECONDS, _SHARE * self._seconds),
            patience=_PATIENCE * self._seconds,
            most_seconds=_MOST * self._seconds,
        )
        try:
            first = self._run(Candidate(), window)
        except CallError as error:
            if error.is_wrong_input:
                raise ConfigurationError(str(error)) from None
            # A process that was killed has left only what it printed.
            output = "" if error.is_raised else f"\n{error.output}"
            raise StepError(f"The run fails, so there is nothing to measure:\n{error}{output.rstrip()}") from None
        if first["steps"] < _LEAST_STEPS:
            raise ConfigurationError(
                f"Only {first['steps']} steps were made in {first['seconds']:.0f} s, and {_LEAST_STEPS} are needed:"
                f" give more time, such as --seconds={math.ceil(4 * self._seconds)}."
            )
        self.first = first
        self.facts = Facts(**first["facts"])
        if first["limit"] is not None:
            self.limit = Limit(**first["limit"])

    def measure(self, candidates: Sequence[Candidate]) -> None:
        """Measure candidates beside the run as it is, in turn.

        Raises:
            StepError: If the run as it is fails before it was measured in a round.
        """
        # 1. The number of steps: whole periods of what happens in some steps only.
        rows = [Row(candidate) for candidate in candidates]
        self.rows += rows
        # What follows takes time that may be over already.
        left = max(self._left(), 1.0)
        step_seconds = self.first["seconds"] / self.first["steps"]
        most_steps = left / len(self.rows) / step_seconds
        for row in rows:
            if row.candidate.period > max(most_steps, _LEAST_STEPS):
                missing = row.candidate.period / most_steps
                more = math.ceil(2 * missing * self._seconds)
                row.reason = f"it needs {row.candidate.period:,} steps: --seconds={more}"
        periods = [row.candidate.period for row in rows if row.reason is None]
        period = math.lcm(*periods)
        # Half of a trial is its start.
        in_time = most_steps / _ROUNDS / 2
        self.steps = period * math.ceil(max(_LEAST_STEPS, in_time) / period)
        if not periods:
            return

        # 2. The rounds. Workers read ahead in the first steps.
        workers = max(candidate.workers for candidate in candidates)
        window = Window(first_steps=FIRST_STEPS + 2 * workers, steps=self.steps)
        for done in range(_ROUNDS):
            # One more takes as long as the mean of the others.
            if done and self._left() < (left - self._left()) / done:
                break
            base, *others = self.rows
            try:
                base.note(self._run(base.candidate, window))
            except (CallError, ConfigurationError) as error:
                if not done:
                    raise StepError(f"The run fails when it is started once more: {_last_line(error)}") from None
                # Nothing can be compared with it in this round. Earlier rounds count.
                break
            for row in others:
                if row.reason is None:
                    self._measure_row(row, window)

    def _left(self) -> float:
        """Return the seconds that trials may take from now on."""
        return self._begun + self._seconds - perf_counter()

    def _measure_row(self, row: Row, window: Window) -> None:
        try:
            row.note(self._run(row.candidate, window))
        except (CallError, ConfigurationError) as error:
            row.reason = _last_line(error)

    def _run(self, candidate: Candidate, window: Window) -> dict[str, Any]:
        folder = self._bench.new_folder()
        values, self.left_out = as_trial(self._compose(candidate.overrides), folder)
        measured: dict[str, Any] = self._bench.run(measure, values, candidate.loader, window, folder)
        return measured


def _last_line(error: Exception) -> str:
    """Return the last line of a message, which is the error where the message is a traceback."""
    return str(error).strip().splitlines()[-1]
