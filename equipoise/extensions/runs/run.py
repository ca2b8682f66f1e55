"""A run as its files tell of it."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Curve", "Metric", "Run", "Unreadable"]

# Values by steps.
Curve = Mapping[float, float]

# Words in the names of metrics that are better when they are lower; "loss" may also be part of a word.
_LOWER = {
    *("err", "error", "mse", "rmse", "mae", "mape", "cost"),
    *("perplexity", "ppl", "nll", "bpc", "wer", "cer", "fid"),
}


@dataclass(frozen=True)
class Unreadable:
    """File or folder that could not be read.

    Attributes:
        path: The file or folder.
        reason: The reason, in a line.
    """

    path: Path
    reason: str


@dataclass(frozen=True)
class Metric:
    """Best and last value of a metric; that is no number if there was no finite one.

    Attributes:
        best: The best finite value.
        last: The last value.
        mode: "min" or "max": which is better.
    """

    best: float
    last: float
    mode: str


@dataclass(kw_only=True)
class Run:
    """Run as its files tell of it. Numbers are None where nothing tells them.

    Attributes:
        folder: Its folder.
        name: Its folder as it is shown.
        state: "finished", "failed", "interrupted", "running" or "unknown".
        error: The error in a line; empty without one.
        began: Start, in seconds of the clock of files.
        seconds: Its duration.
        epochs: Finished epochs.
        steps: Optimiser steps.
        peak_memory: Peak of each device in bytes.
        monitored: "min" or "max" for metrics that checkpoints monitor.
        curves: Values by step for each metric.
        times: Seconds since the start by step; empty if unknown.
        configuration: Its values as text, by keys such as "module.lr".
        origin: Facts as text, such as "command", "commit" and "python".
        overrides: Its overrides on a command line, those of its own job in a sweep.
        report: The page of its report.
    """

    folder: Path
    name: str
    state: str = "unknown"
    error: str = ""
    began: float | None = None
    seconds: float | None = None
    epochs: int | None = None
    steps: int | None = None
    peak_memory: Mapping[str, int] = field(default_factory=dict)
    monitored: Mapping[str, str] = field(default_factory=dict)
    curves: Mapping[str, Curve] = field(default_factory=dict)
    times: Curve = field(default_factory=dict)
    configuration: Mapping[str, str] = field(default_factory=dict)
    origin: Mapping[str, str] = field(default_factory=dict)
    overrides: Sequence[str] = ()
    report: Path | None = None

    def __post_init__(self) -> None:
        self.metrics: dict[str, Metric] = {}
        for name, curve in self.curves.items():
            if curve:
                self.metrics[name] = self._metric(name, curve)

    @property
    def peak(self) -> int | None:
        """Highest peak of its devices in bytes."""
        return max(self.peak_memory.values(), default=None)

    def _metric(self, name: str, curve: Curve) -> Metric:
        mode = self.monitored.get(name) or _usual_mode(name)
        finite = [value for value in curve.values() if math.isfinite(value)]
        best = max(finite, default=math.nan)
        if mode == "min":
            best = min(finite, default=math.nan)
        return Metric(best, curve[max(curve)], mode)


def _usual_mode(name: str) -> str:
    words = set(re.split(r"[^a-z]+", name.lower()))
    if "loss" in name.lower() or not words.isdisjoint(_LOWER):
        return "min"
    return "max"
