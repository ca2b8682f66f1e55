"""Costs of compiling or capturing, before it saves anything: rows in the summary of a run."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from equipoise.errors import ConfigurationError
from equipoise.formats import format_bytes, format_duration
from equipoise.memory.devices import PeakMeter

__all__ = ["TrialCosts"]


class TrialCosts:
    """Time and memory that a run needs until a program computes its steps.

    Args:
        device: The device of the trials.
        rows: Rows of the summary, values by their names.
        done: "compiled" or "captured".

    Attributes:
        seconds: The time that trials have taken, compilation included.
        extra: The largest additional memory of a trial, in bytes; see `PeakMeter`. None: the device has no readings.
    """

    def __init__(self, device: torch.device, rows: dict[str, str], done: str) -> None:
        self._device = device
        self._rows = rows
        self._done = done
        self._first_batch: float | None = None
        self.seconds = 0.0
        self.extra: int | None = None

    def begin(self) -> None:
        """Begin the first batch. Later calls have no effect."""
        if self._first_batch is None:
            self._first_batch = time.perf_counter()

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure a trial in a `with` block."""
        begin = time.perf_counter()
        # Some kinds of devices have no readings.
        try:
            meter: PeakMeter | None = PeakMeter(self._device)
        except ConfigurationError:
            meter = None
        try:
            if meter is None:
                yield
                return
            with meter:
                yield
        finally:
            self.seconds += time.perf_counter() - begin
            if meter is not None:
                self.extra = max(self.extra or 0, meter.extra)

    def report(self) -> None:
        """Write the rows, when a program is used for the first time."""
        name = f"time to first {self._done} step"
        if self._first_batch is None or name in self._rows:
            return
        self._rows[name] = format_duration(time.perf_counter() - self._first_batch)
        if self.extra is not None:
            self._rows[f"memory to be {self._done}"] = f"{format_bytes(self.extra)} at the peak"
