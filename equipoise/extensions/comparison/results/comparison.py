"""Results of a comparison: a row for each strategy, as plain data, JSON and CSV."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Comparison", "Row"]


@dataclass
class Row:
    """The result of a strategy.

    Attributes:
        label: Name of the strategy, with what sets it apart.
        overrides: The overrides that choose it.
        devices: Names of its devices.
        reason: The reason why it has no figures. Default: None.
        peaks: The peak of each device in a step, in bytes, by name.
        predicted: The same as predicted, where there is a prediction. Default: None.
        seconds: The time of a step.
        samples_per_second: Samples of all devices per second; None if the number of samples is unknown.
        idle: Share of the devices' time in a step in which they wait, from 0 to 1; None if unknown.
        distance: Norm of the difference between its weights and those of one device, relative to the norm of the
            latter; None if there is nothing to compare with.
        largest_batch: The largest batch that ran; None if none was looked for.
        is_bound: Whether that is the largest that was tried, so that more may be possible. Default: False.
    """

    label: str
    overrides: Sequence[str] = ()
    devices: Sequence[str] = ()
    reason: str | None = None
    peaks: dict[str, int] = field(default_factory=dict)
    predicted: dict[str, int] | None = None
    seconds: float | None = None
    samples_per_second: float | None = None
    idle: float | None = None
    distance: float | None = None
    largest_batch: int | None = None
    is_bound: bool = False

    def note(self, measured: dict[str, Any]) -> None:
        """Note the result of its trial.

        Args:
            measured: The measurements, or under "reason" why there are none.
        """
        # 1. The reason if there are no measurements.
        self.reason = measured.get("reason")
        if self.reason is not None:
            return
        # 2. The measurements. Some are unknown for some strategies.
        self.peaks = measured["peaks"]
        self.seconds = measured["seconds"]
        self.samples_per_second = measured["samples_per_second"]
        self.idle = measured.get("idle")
        self.distance = measured.get("distance")

    def note_largest(self, size: int | None, *, is_bound: bool) -> None:
        """Note the largest batch that ran; see the attributes."""
        self.largest_batch = size
        self.is_bound = is_bound

    @property
    def is_measured(self) -> bool:
        """True if it has figures."""
        return self.seconds is not None

    @property
    def fullest(self) -> int | None:
        """The largest peak of a device in bytes; None if none was measured."""
        return max(self.peaks.values(), default=None)

    @property
    def imbalance(self) -> float | None:
        """The largest peak divided by the mean of all devices; None for one device."""
        if len(self.peaks) < 2:
            return None
        return max(self.peaks.values()) * len(self.peaks) / sum(self.peaks.values())

    def as_dict(self) -> dict[str, Any]:
        """Return the row in plain data, without predicted peaks if there are none."""
        values = {
            "strategy": self.label,
            "overrides": list(self.overrides),
            "devices": list(self.devices),
            "state": "done" if self.is_measured else "not run",
            "reason": self.reason,
            "samples_per_second": self.samples_per_second,
            "seconds": self.seconds,
            "peaks": self.peaks,
            "imbalance": self.imbalance,
            "idle": self.idle,
            "distance": self.distance,
            "largest_batch": self.largest_batch,
            "largest_batch_is_bound": self.is_bound,
        }
        if self.predicted is not None:
            values["predicted_peaks"] = self.predicted
        return values


@dataclass
class Comparison:
    """Results of all strategies.

    Attributes:
        title: Name of the module's class.
        devices: Names of the devices, numbered where they have the same one.
        batch_size: Samples of a step; None if unknown.
        steps: Number of steps after which weights are compared.
        notes: Notes on what the figures do and do not tell, a sentence or two each.
        rows: The results.
        outcome: "finished", or "interrupted".
    """

    title: str
    devices: Sequence[str]
    batch_size: int | None
    steps: int
    notes: Sequence[str] = ()
    rows: list[Row] = field(default_factory=list)
    outcome: str = "finished"

    @property
    def measured(self) -> list[Row]:
        """The rows with figures."""
        return [row for row in self.rows if row.is_measured]

    @property
    def has_predictions(self) -> bool:
        """True if peaks of a row were predicted, so that there is something to show beside the measured ones."""
        return any(row.predicted is not None for row in self.rows)

    def note_predicted(self, peaks: dict[str, dict[str, int]]) -> None:
        """Note the predicted peaks of strategies, by their labels."""
        for row in self.rows:
            row.predicted = peaks.get(row.label)

    def interrupt(self) -> None:
        """Note that rows without figures will have none. What is measured stays."""
        self.outcome = "interrupted"
        for row in self.rows:
            if not row.is_measured and row.reason is None:
                row.reason = "the comparison was interrupted"

    def to_json(self, recommendation: dict[str, Any] | None) -> str:
        """Return the results as JSON."""
        content = {
            "module": self.title,
            "outcome": self.outcome,
            "devices": list(self.devices),
            "batch_size": self.batch_size,
            "steps": self.steps,
            "notes": list(self.notes),
            "rows": [row.as_dict() for row in self.rows],
            "recommendation": recommendation,
        }
        return json.dumps(content, indent=2)

    def write_csv(self, path: Path) -> None:
        """Write a row for each strategy, with a column for the peak of each device."""
        text = io.StringIO()
        writer = csv.writer(text)
        # 1. The heads.
        heads = ["strategy", "state", "samples_per_second", "seconds", "imbalance", "idle", "distance", "largest_batch"]
        peak_heads = [f"peak of {name}" for name in self.devices]
        if self.has_predictions:
            peak_heads += [f"predicted peak of {name}" for name in self.devices]
        writer.writerow([*heads, *peak_heads, "overrides", "reason"])
        # 2. The rows.
        for row in self.rows:
            values = row.as_dict()
            cells = [values[head] for head in heads]
            peaks = _by_device(row.peaks, len(self.devices))
            if self.has_predictions:
                peaks += _by_device(row.predicted or {}, len(self.devices))
            writer.writerow([*cells, *peaks, " ".join(row.overrides), row.reason])
        path.write_text(text.getvalue(), encoding="utf-8")


def _by_device(peaks: dict[str, int], count: int) -> list[int | None]:
    """Return the peaks in the order of the devices; a strategy on one device has used the first."""
    values: list[int | None] = list(peaks.values())
    return values + [None] * (count - len(values))
