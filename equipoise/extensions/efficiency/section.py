"""The section of the report about the use of devices."""

from typing import Any

from equipoise.extensions.efficiency.efficiency import Efficiency
from equipoise.extensions.efficiency.usage import Usage, energy, operations
from equipoise.extensions.report.page.record import ReportSection
from equipoise.formats import format_count

__all__ = ["section"]

# Rows of epochs; the chart has all.
_MOST_ROWS = 20


def section(trainer: Any, module: Any) -> ReportSection | None:
    """Return a section with the values of the run and of its last epochs; None without `Efficiency`."""
    callbacks = [callback for callback in trainer.callbacks if isinstance(callback, Efficiency)]
    if not callbacks or callbacks[0].usage is None:
        return None
    callback = callbacks[0]
    usage = callback.usage
    assert usage is not None
    # 1. What is missing, and why.
    missing = []
    if callback.why_not_counted:
        missing.append(f"Operations were not counted: {callback.why_not_counted}.")
    elif usage.peak is None:
        missing.append("The peak of the device is unknown: give it as Efficiency(peak=...).")
    if usage.joules is None:
        missing.append("Energy is not available: no meter can be read (NVML with nvidia-ml-py, or RAPL).")
    # 2. The table.
    table: list[tuple[str, ...]] = [("time", "samples/s", "tokens/s", "operations/s", "share of the peak", "energy")]
    table.append(("whole training", *_cells(usage)))
    for step, epoch in callback.history[-_MOST_ROWS:]:
        table.append((f"epoch up to step {step:,}", *_cells(epoch)))
    # 3. The chart.
    lines = {}
    shares = [(float(step), 100 * epoch.values().get("utilisation", 0.0)) for step, epoch in callback.history]
    if usage.peak and usage.operations and len(shares) > 1:
        lines["percent of the peak"] = shares
    return ReportSection("Efficiency", " ".join(missing), table, lines)


def _cells(usage: Usage) -> tuple[str, ...]:
    values = usage.values()
    formats = {
        "samples_per_second": format_count,
        "tokens_per_second": format_count,
        "operations_per_second": operations,
        "utilisation": "{:.1%}".format,
        "joules": energy,
    }
    cells = []
    for name, write in formats.items():
        cell = "-"
        if name in values:
            cell = write(values[name])
        cells.append(cell)
    return tuple(cells)
