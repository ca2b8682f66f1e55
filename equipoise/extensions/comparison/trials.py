"""The trials of `equipoise compare`, one after the other."""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from equipoise.app.command import report
from equipoise.errors import ConfigurationError, StepError
from equipoise.extensions.common.bench import Bench
from equipoise.extensions.comparison.measuring.candidates import Attempt, Candidate, batch_size_of
from equipoise.extensions.comparison.measuring.largest import largest_that_runs
from equipoise.extensions.comparison.measuring.predicted_peaks import predict_peaks
from equipoise.extensions.comparison.measuring.trial import measure
from equipoise.extensions.comparison.options import Options
from equipoise.extensions.comparison.results.comparison import Comparison, Row
from equipoise.extensions.comparison.results.recommendation import notes_on
from equipoise.memory.profile.places import names_of_devices
from equipoise.parallel.workers.bounded_call import CallError

__all__ = ["Trials"]

# The largest batch to try, in multiples of the configured one.
_MOST_TIMES = 64


class Trials:
    """Runs one trial after the other.

    Attributes:
        comparison: The results so far.
    """

    def __init__(
        self,
        values: dict[str, Any],
        devices: list[str],
        candidates: Sequence[Candidate],
        bench: Bench,
        options: Options,
        user_overrides: Sequence[str],
    ) -> None:
        size = batch_size_of(values)
        self.comparison = Comparison(
            title=values["module"]["_target_"].rpartition(".")[2],
            devices=names_of_devices(devices),
            batch_size=size,
            # One before the measurements, and two beside the timed ones; see `DeviceProbe`.
            steps=options.steps + 3,
            notes=notes_on(devices, has_batch_size=size is not None),
        )
        self._values = values
        self._devices = devices
        self._bench = bench
        self._options = options
        self._attempts: list[tuple[Attempt, Row]] = []
        for candidate in candidates:
            attempt = candidate.attempt(values, devices, user_overrides)
            row = Row(candidate.label, attempt.overrides, attempt.devices, attempt.reason)
            self._attempts.append((attempt, row))
            self.comparison.rows.append(row)

    def run(self) -> None:
        """Run all strategies.

        Raises:
            ConfigurationError: If the configuration is wrong, so that the trial on one device cannot run.
            StepError: If a step fails on one device for another reason than memory.
        """
        report("predicting the peaks")
        self._predict()
        for attempt, row in self._attempts:
            if row.reason is None:
                report(f"measuring {row.label}")
                self._run_one(attempt, row)

    def _predict(self) -> None:
        """Note the predicted peaks of the strategies that run, or why there are none."""
        attempts = [attempt for attempt, row in self._attempts if row.reason is None]
        if not attempts:
            return
        try:
            peaks = self._bench.run(predict_peaks, self._values, attempts)
        except CallError as error:
            note = f"Peaks are not predicted: {str(error).rstrip('.')}."
            self.comparison.notes = [*self.comparison.notes, note]
        else:
            self.comparison.note_predicted(peaks)

    def _run_one(self, attempt: Attempt, row: Row) -> None:
        """Run a strategy, and search its largest batch."""
        # 1. The configured batch. Steps of other sizes lead to other weights.
        try:
            measured = self._measure(attempt, self._options.steps, self._bench.folder / "weights.pt")
        except CallError as error:
            if attempt.candidate.name == "single_device":
                _raise_again(error)
            # A failure is a result as well: the row shows it.
            measured = {"reason": str(error)}
        if not attempt.has_same_batches:
            measured.pop("distance", None)
        row.note(measured)

        # 2. Other sizes.
        has_run = row.reason is None
        if self._options.searches_largest and (has_run or measured.get("is_memory")):
            self._search_largest(attempt.candidate, row, has_run=has_run)

    def _measure(self, attempt: Attempt, steps: int, weights: Path | None) -> dict[str, Any]:
        measured: dict[str, Any] = self._bench.run(measure, attempt, steps, weights, self._bench.new_folder())
        return measured

    def _search_largest(self, candidate: Candidate, row: Row, *, has_run: bool) -> None:
        """Search the largest batch of a strategy."""
        size = self.comparison.batch_size
        assert size is not None
        # 1. What the configured size has shown.
        running_size = 0
        failed_size: int | None = size
        if has_run:
            running_size = size
            failed_size = None

        # 2. Processes share a batch evenly.
        multiple = 1
        if candidate.has_processes:
            multiple = len(self._devices)
        largest, is_bound = largest_that_runs(
            lambda tried: self._runs(candidate, tried),
            running_size,
            failed_size,
            self._options.bound or _MOST_TIMES * size,
            multiple,
        )
        row.note_largest(largest, is_bound=is_bound)

    def _runs(self, candidate: Candidate, size: int) -> bool:
        """Return True if a batch size runs."""
        values = deepcopy(self._values)
        values["data"]["batch_size"] = size
        try:
            return "reason" not in self._measure(candidate.attempt(values, self._devices), 1, None)
        except CallError:
            return False


def _raise_again(error: CallError) -> None:
    """Raise an error of the trial on one device with which no strategy could run."""
    if error.is_wrong_input:
        raise ConfigurationError(str(error)) from None
    if error.is_raised:
        raise StepError(f"A step fails on one device already, so there is nothing to compare: {error}") from None
