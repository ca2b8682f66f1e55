"""The section of the report about the time of a run."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from equipoise.extensions.report.page.record import ReportSection
from equipoise.extensions.timing.step_times import StepTimes
from equipoise.formats import format_duration

__all__ = ["section"]

# As many as the page has colours.
_MOST_LINES = 6


def section(trainer: Any, module: Any) -> ReportSection | None:
    """Return a section with the time of each part; None without `StepTimes`, or for a run of very few steps."""
    callbacks = [callback for callback in trainer.callbacks if isinstance(callback, StepTimes)]
    if not callbacks:
        return None
    callback = callbacks[0]
    times = callback.times
    if times is None:
        return None
    table = [("part", "share", "time")]
    for name, share in times.shares().items():
        table.append((name, f"{share:.1%}", format_duration(times.parts[name])))
    text = f"{times.steps:,} steps after the first ones, which took {format_duration(times.first_seconds)}."
    if callback.limit is not None:
        text += f" What limits this run: {callback.limit}."
    lines = _stacked(callback.history)
    if lines:
        text += " The chart stacks the parts: the percentage of each epoch up to each line."
    return ReportSection("Time", text, table, lines)


def _stacked(history: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, list[tuple[float, float]]]:
    """Return the upper border of each part over the epochs, the largest part at the bottom; none for one epoch."""
    if len(history) < 2:
        return {}
    totals: Counter[str] = Counter()
    for _, shares in history:
        totals.update(shares)
    lines: dict[str, list[tuple[float, float]]] = {}
    # Sum of the parts so far at each epoch, in percent.
    heights = [0.0] * len(history)
    for name, _ in totals.most_common(_MOST_LINES):
        lines[name] = []
        for index, (step, shares) in enumerate(history):
            heights[index] += 100 * shares.get(name, 0.0)
            lines[name].append((step, heights[index]))
    return lines
