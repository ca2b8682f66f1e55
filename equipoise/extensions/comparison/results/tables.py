"""The table of a comparison, and what stands below it."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from equipoise.extensions.comparison.results.comparison import Comparison, Row
from equipoise.formats import format_bytes, format_count, format_path
from equipoise.tables.whole_table import print_table, print_text

__all__ = [
    "comparison_table",
    "meaning_of_columns",
    "print_comparison",
    "reasons_in_words",
    "row_texts",
]

# Between the peaks of two devices.
_BETWEEN = " | "
# On a terminal they stand in lines of their own, if there are more devices or columns than these.
_MOST_IN_A_LINE = 2
_USUAL_COLUMNS = 5


def comparison_table(comparison: Comparison) -> Table:
    """Return the table of all strategies."""
    # 1. The title, which states what a step is.
    size = ""
    if comparison.batch_size is not None:
        size = f" of {comparison.batch_size} samples"
    table = Table(
        box=box.SIMPLE_HEAD,
        header_style="bold",
        pad_edge=False,
        collapse_padding=True,
        title=f"{comparison.title}: steps{size} on {', '.join(comparison.devices)}",
        title_justify="left",
    )
    # 2. The columns. In a narrow terminal only heads are broken.
    texts = [row_texts(row, comparison) for row in comparison.rows]
    is_stacked = len(texts[0]) > _USUAL_COLUMNS or len(comparison.devices) > _MOST_IN_A_LINE
    table.add_column("strategy", no_wrap=True)
    for head in texts[0]:
        table.add_column(head, justify="right")
    # 3. The rows.
    for row, row_cells in zip(comparison.rows, texts, strict=True):
        cells: list[str | Text] = [row.label]
        for text in row_cells.values():
            if is_stacked:
                text = text.replace(_BETWEEN, "\n")
            cells.append(Text(text, no_wrap=True))
        table.add_row(*cells)
    return table


def row_texts(row: Row, comparison: Comparison) -> dict[str, str]:
    """Return the figures of a row, by the heads of their columns.

    Args:
        row: The row.
        comparison: All results. A column without a figure in any row is left out.
    """
    texts = {"samples/s": _rate(row), "peak by device": _peaks_text(row.peaks)}
    if comparison.has_predictions:
        texts["predicted"] = _peaks_text(row.predicted or {})
    # One device has neither imbalance nor distance.
    if any(other.imbalance is not None for other in comparison.rows):
        texts["imbalance"] = "-" if row.imbalance is None else f"{row.imbalance:.2f}"
    if any(other.idle is not None for other in comparison.rows):
        texts["idle"] = "-" if row.idle is None else f"{row.idle:.0%}"
    if any(other.distance is not None for other in comparison.rows):
        texts["distance"] = _distance(row.distance)
    if any(other.largest_batch for other in comparison.rows):
        texts["largest batch"] = _largest_text(row)
    return texts


def meaning_of_columns(comparison: Comparison) -> list[str]:
    """Return a sentence on the columns whose heads do not say what they mean; none if the table has no such column."""
    meanings = {
        "imbalance": "the fullest device divided by the mean",
        "idle": "the share of the devices' time in which they wait",
        "distance": f"of the weights after {comparison.steps} steps from those of one device",
    }
    columns = {head for row in comparison.rows for head in row_texts(row, comparison)}
    told = [f"{head}: {meaning}" for head, meaning in meanings.items() if head in columns]
    if not told:
        return []
    return [f"{'; '.join(told)}."]


def _rate(row: Row) -> str:
    if not row.is_measured:
        return "not run"
    if row.samples_per_second is None:
        return "-"
    return format_count(row.samples_per_second)


def _peaks_text(peaks: dict[str, int]) -> str:
    """Return the peaks of all devices in order."""
    return _BETWEEN.join(format_bytes(peak) for peak in peaks.values()) or "-"


def _distance(distance: float | None) -> str:
    if distance is None:
        return "-"
    if not distance:
        return "0"
    return f"{distance:.0e}"


def _largest_text(row: Row) -> str:
    """Return the largest batch that ran, with a plus if no larger one was tried."""
    if row.largest_batch is None:
        return "-"
    if row.is_bound:
        return f"{row.largest_batch}+"
    return str(row.largest_batch)


def reasons_in_words(comparison: Comparison) -> list[str]:
    """Return a sentence for each reason why strategies did not run, with all strategies that have the same one.

    Example:
        >>> rows = [Row("single_device"), Row("dp", reason="one device"), Row("ddp", reason="one device")]
        >>> reasons_in_words(Comparison("Net", ["cpu"], 8, 5, rows=rows))
        ['dp, ddp did not run: one device']
    """
    labels: dict[str, list[str]] = {}
    for row in comparison.rows:
        if row.reason is not None:
            labels.setdefault(row.reason, []).append(row.label)
    return [f"{', '.join(names)} did not run: {reason}" for reason, names in labels.items()]


def print_comparison(comparison: Comparison, recommendation: dict[str, Any] | None, files: list[str]) -> None:
    """Print the closing table, the reasons, the notes and the recommendation."""
    console = Console()
    # 1. The table.
    print_table(comparison_table(comparison), console)
    # Sentences stand outside of the table, so that it does not break them.
    # 2. Reasons, and what the columns mean.
    lines = reasons_in_words(comparison)
    lines += meaning_of_columns(comparison)
    lines += comparison.notes
    # 3. The recommendation, with overrides in a line that can be copied.
    if recommendation is not None:
        lines.append(f"\nRecommended on this machine: {recommendation['strategy']}. {recommendation['reason']}")
        lines.append(f"  {' '.join(recommendation['overrides'])}")
    lines += [f"Written: {format_path(path)}" for path in files]
    for line in lines:
        print_text(line, console)
