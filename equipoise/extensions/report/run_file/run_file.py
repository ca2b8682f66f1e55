"""Write `run.json`: the state, curves and times of a run, in a bounded number of values."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from equipoise.extensions.common.page.page import write_page
from equipoise.extensions.common.page.scales import Point, thin
from equipoise.extensions.report.run_file.plain_json import as_json
from equipoise.interop.remote.paths import AnyPath

__all__ = ["add_test", "write_run_file"]

_FILE = "run.json"
# Points of a curve: three of each of 84 stretches, and both ends.
_MOST_POINTS = 254
_MOST_CURVES = 200
_LONGEST_ERROR = 500
# Curves of a MemoryLogger have such names. The peak stands by itself.
_MEMORY = "memory/"


def write_run_file(
    folder: AnyPath,
    facts: Mapping[str, Any],
    *,
    error: str,
    curves: Mapping[str, Mapping[float, float]],
    times: Sequence[Point],
) -> None:
    """Write the file, whole or not at all.

    Args:
        folder: The folder in which it will lie.
        facts: Values of JSON by their names.
        error: Traceback of a fit that failed, else empty.
        curves: Values by step for each metric.
        times: Steps done, and the seconds since the start.

    Raises:
        OSError: If the file cannot be written.
    """
    values = dict(facts)
    values["error"] = _error_line(error)
    values["curves"] = _thinned(curves)
    values["times"] = _columns(times)
    write_page(json.dumps(as_json(values)), folder / _FILE)


def add_test(folder: AnyPath, metrics: Mapping[str, float]) -> None:
    """Add the metrics of a test to the file of a fit, at its last step.

    Args:
        folder: The folder in which it lies.
        metrics: Numbers by name.

    Raises:
        OSError: If the file cannot be read or written.
    """
    path = folder / _FILE
    values = json.loads(path.read_text(encoding="utf-8"))
    last_step = max(0, values["steps"] - 1)
    values["curves"] |= {name: _columns([(last_step, value)]) for name, value in metrics.items()}
    write_page(json.dumps(as_json(values)), path)


def _error_line(trace: str) -> str:
    """Return the first line of the message of the last error in a traceback."""
    lines = [line for line in trace.splitlines() if line.strip()]
    message = ""
    for line in lines:
        if line.startswith("  File "):
            # What follows the last frame is the message.
            message = ""
        elif not message and not line.startswith(" "):
            message = line
    return message[:_LONGEST_ERROR]


def _thinned(curves: Mapping[str, Mapping[float, float]]) -> dict[str, list[list[float]]]:
    """Return the steps and the values of each curve."""
    thinned: dict[str, list[list[float]]] = {}
    for name, curve in curves.items():
        if name.startswith(_MEMORY) or len(thinned) == _MOST_CURVES:
            continue
        thinned[name] = _columns(list(curve.items()))
    return thinned


def _columns(points: Sequence[Point]) -> list[list[float]]:
    """Return thinned points as a list across and a list up."""
    across = []
    up = []
    for x, y in thin(points, _MOST_POINTS):
        across.append(x)
        # More digits would be noise, and half of the file.
        up.append(float(f"{y:.7g}"))
    return [across, up]
