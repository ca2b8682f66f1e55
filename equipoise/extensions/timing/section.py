"""The section of the report about the time of a run."""

from typing import Any

from equipoise.extensions.report.page.record import ReportSection
from equipoise.extensions.timing.step_times import StepTimes
from equipoise.formats import format_duration

__all__ = ["section"]


def section(trainer: Any, module: Any) -> ReportSection | None:
    """Return a section with the time of each part; None without `StepTimes`, or for a run of very few steps."""
    callbacks = [callback for callback in trainer.callbacks if isinstance(callback, StepTimes)]
    if not callbacks or callbacks[0].times is None:
        return None
    times = callbacks[0].times
    table = [("part", "share", "time")]
    for name, share in times.shares().items():
        table.append((name, f"{share:.1%}", format_duration(times.parts[name])))
    text = f"{times.steps:,} steps after the first ones, which took {format_duration(times.first_seconds)}."
    limit = callbacks[0].limit
    if limit is not None:
        text += f" What limits this run: {limit}."
    return ReportSection("Time", text, table)
