"""compare.html: speed, memory by device, and a table of all strategies."""

from collections.abc import Iterator, Mapping
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

__all__ = ["comparison_page"]

# Colours of devices.
_STYLES = ("val", "s0", "s1", "s2", "s3", "s4", "s5")
# Characters of a cell that stays in one line.
_LONGEST_NUMBER = 24


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
    notes = [meaning_of_columns(comparison), *comparison.notes]
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
    chart_of_peaks = bar_chart("Peak of each device in a step", peaks, "bytes")
    chart_of_rates = bar_chart("Samples per second", rates, "number")
    return section("Measured", tag("div", chart_of_peaks, chart_of_rates, class_="charts"))


def _bars_of_peaks(row: Row) -> list[Bar]:
    bars = []
    predicted = row.predicted or {}
    for index, (name, peak) in enumerate(row.peaks.items()):
        # Devices have one colour in all rows.
        bars.append(Bar(f"device {index}", peak, _STYLES[index % len(_STYLES)]))
        if name in predicted:
            bars.append(Bar("predicted", predicted[name], "reserved"))
    return bars


def _table(comparison: Comparison, chosen: str | None) -> Markup:
    """Return the table of all strategies; see `_pictures`."""
    # 1. The cells.
    texts = [row_texts(row, comparison) for row in comparison.rows]
    columns = list(texts[0])
    rows = []
    for row, row_cells in zip(comparison.rows, texts, strict=True):
        label: object = row.label
        if row.label == chosen:
            label = join(row.label, " ", tag("span", "recommended", class_="chip"))
        rows.append([label, *row_cells.values(), " ".join(row.overrides)])

    # 2. The table. Cells of numbers are not broken: peaks of many devices are too long for that.
    longest = [max(len(row_cells[column]) for row_cells in texts) for column in columns]
    numbers = [index for index, length in enumerate(longest, start=1) if length <= _LONGEST_NUMBER]
    whole_table = table(["strategy", *columns, "overrides"], rows, numbers=numbers)

    # 3. Sentences stand outside of the table, whose columns they would squeeze.
    return section("All strategies", whole_table, *[hint(line) for line in reasons_in_words(comparison)])
