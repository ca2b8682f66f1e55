"""compare.html: speed, memory by device, and a table of all strategies."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from equipoise.extensions.common.page.markup import Markup, hint, join, section, table, tag
from equipoise.extensions.common.page.page import (
    configuration_section,
    facts_section,
    html_page,
    page_header,
    recommendation_section,
)
from equipoise.extensions.comparison.results.bars import Bar, bar_chart
from equipoise.extensions.comparison.results.comparison import Comparison, Row
from equipoise.extensions.comparison.results.tables import meaning_of_columns, reasons_in_words, row_texts
from equipoise.formats import format_bytes

__all__ = ["comparison_page"]

# Colours of devices.
_STYLES = ("val", "s0", "s1", "s2", "s3", "s4", "s5")
# Devices whose peaks have columns; of more, the chart shows all and the table the highest.
_MOST_DEVICES = 4


def comparison_page(
    comparison: Comparison, recommendation: Mapping[str, Any] | None, configuration: Mapping[str, Any]
) -> str:
    """Return the HTML of compare.html."""
    header = page_header("Strategies compared", comparison.title, outcome=comparison.outcome)
    title = f"{comparison.title}: strategies compared"
    return html_page(title, header, _sections(comparison, recommendation, configuration))


def _sections(
    comparison: Comparison, recommendation: Mapping[str, Any] | None, configuration: Mapping[str, Any]
) -> Iterator[Markup | None]:
    # 1. The facts and the recommendation.
    yield facts_section(_facts(comparison))
    chosen = None
    if recommendation is not None:
        chosen = recommendation["strategy"]
        reason = recommendation["reason"]
        yield recommendation_section(f"{chosen}, on this machine. {reason}", recommendation["overrides"])

    # 2. The results, and what they mean.
    yield _pictures(comparison, chosen)
    yield _table(comparison, chosen)
    notes = [*meaning_of_columns(comparison), *comparison.notes]
    if notes:
        yield section("What these figures tell", *map(hint, notes))

    # 3. The configuration.
    yield configuration_section(yaml.safe_dump(dict(configuration), sort_keys=False))


def _facts(comparison: Comparison) -> dict[str, str]:
    facts = {"devices": ", ".join(comparison.devices)}
    if comparison.batch_size is not None:
        facts["samples of a step"] = str(comparison.batch_size)
    facts["strategies measured"] = f"{len(comparison.measured)} of {len(comparison.rows)}"
    return facts


def _pictures(comparison: Comparison, chosen: str | None) -> Markup:
    """Draw the peaks and the rates."""
    if not any(row.peaks for row in comparison.rows):
        return section("Measured", hint("No strategy has run."))

    # 1. The bars of each strategy.
    peaks = {}
    rates = {}
    for row in comparison.rows:
        peaks[row.label] = _bars_of_peaks(row)
        if row.samples_per_second is None:
            continue
        style = "val"
        if row.label == chosen:
            # The recommended one stands out.
            style = "s1"
        rates[row.label] = [Bar("samples per second", row.samples_per_second, style)]

    # 2. The charts.
    note = ""
    if comparison.has_predictions:
        note = "strokes: predicted"
    chart_of_peaks = bar_chart("Peak of each device in a step", peaks, "bytes", note)
    chart_of_rates = bar_chart("Samples per second", rates, "number")
    return section("Measured", tag("div", chart_of_peaks, chart_of_rates, class_="charts"))


def _bars_of_peaks(row: Row) -> list[Bar]:
    bars = []
    predicted = row.predicted or {}
    for index, (name, peak) in enumerate(row.peaks.items()):
        # Devices have one colour in all rows.
        bars.append(Bar(f"device {index}", peak, _STYLES[index % len(_STYLES)], predicted.get(name)))
    return bars


def _table(comparison: Comparison, chosen: str | None) -> Markup:
    """Return the table of all strategies; see `_pictures`."""
    # 1. The cells.
    texts = [_cells(row, comparison) for row in comparison.rows]
    columns = list(texts[0])
    rows = []
    for row, row_cells in zip(comparison.rows, texts, strict=True):
        label: object = row.label
        if row.label == chosen:
            label = join(row.label, " ", tag("span", "recommended", class_="chip"))
        rows.append([label, *row_cells.values(), tag("code", " ".join(row.overrides))])

    # 2. The table.
    whole_table = table(["strategy", *columns, "overrides"], rows, numbers=range(1, len(columns) + 1))

    # 3. Sentences stand outside of the table, whose columns they would squeeze.
    return section("All strategies", whole_table, *[hint(line) for line in reasons_in_words(comparison)])


def _cells(row: Row, comparison: Comparison) -> dict[str, str]:
    """Return the figures of a row by the heads of their columns, one in each cell; the chart has the predictions."""
    devices = max(len(other.peaks) for other in comparison.rows)
    cells: dict[str, str] = {}
    for head, text in row_texts(row, comparison).items():
        if head == "peak by device":
            cells |= _peak_cells([*row.peaks.values()], devices)
        elif head != "predicted":
            cells[head] = text
    return cells


def _peak_cells(peaks: Sequence[int], devices: int) -> dict[str, str]:
    """Return the peak of each device, or the highest of many."""
    texts = [format_bytes(peak) for peak in peaks]
    texts += ["-"] * (devices - len(texts))
    if devices <= 1:
        return {"peak": (texts or ["-"])[0]}
    if devices > _MOST_DEVICES:
        highest = "-"
        if peaks:
            highest = format_bytes(max(peaks))
        return {"highest peak": highest}
    return {f"peak, device {index}": text for index, text in enumerate(texts)}
