"""compare.html: speed, memory by device, and a table of all strategies."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import yaml

from equipoise.extensions.comparison.results.bars import Bar, bar_chart
from equipoise.extensions.comparison.results.comparison import Comparison, Row
from equipoise.extensions.comparison.results.tables import meaning_of_columns, reasons_in_words, row_texts
from equipoise.extensions.report.page.markup import Markup, hint, join, section, table, tag
from equipoise.extensions.report.page.page import facts_section, html_page, page_header, recommendation_section
from equipoise.extensions.report.page.sections import configuration_section

__all__ = ["comparison_page"]

# Colours of devices.
_STYLES = ("val", "s0", "s1", "s2", "s3", "s4", "s5")
# Characters of a cell that stays in one line.
_LONGEST_NUMBER = 24


def comparison_page(
    comparison: Comparison, recommendation: Mapping[str, Any] | None, configuration: Mapping[str, Any]
) -> str:
    """Return the HTML of compare.html.

    Args:
        comparison: The results.
        recommendation: The recommended row; None if there is none.
        configuration: The configuration of the command.
    """
    header = page_header("Strategies compared", comparison.title, datetime.now(), comparison.outcome)
    sections = _sections(comparison, recommendation, configuration)
    return html_page(f"{comparison.title}: strategies compared", header, sections)


def _sections(
    comparison: Comparison, recommendation: Mapping[str, Any] | None, configuration: Mapping[str, Any]
) -> Iterator[Markup | None]:
    yield facts_section(_facts(comparison))
    chosen = None
    if recommendation is not None:
        chosen = recommendation["strategy"]
        sentences = f"{chosen}, on this machine. {recommendation['reason']}"
        yield recommendation_section(sentences, recommendation["overrides"])
    yield _pictures(comparison, chosen)
    yield _table(comparison, chosen)
    notes = [meaning_of_columns(comparison), *comparison.notes]
    yield section("What these figures tell", *(hint(note) for note in notes))
    yield configuration_section(yaml.safe_dump(dict(configuration), sort_keys=False))


def _facts(comparison: Comparison) -> dict[str, str]:
    facts = {"devices": ", ".join(comparison.devices)}
    if comparison.batch_size is not None:
        facts["samples of a step"] = str(comparison.batch_size)
    facts["strategies measured"] = f"{len(comparison.measured)} of {len(comparison.rows)}"
    return facts


def _pictures(comparison: Comparison, chosen: str | None) -> Markup:
    """Draw the peaks and the rates.

    Args:
        comparison: The results.
        chosen: Name of the recommended strategy; None if there is none.
    """
    if not any(row.peaks for row in comparison.rows):
        return section("Measured", hint("No strategy has run."))
    peaks = {row.label: _bars_of_peaks(row) for row in comparison.rows}
    rates = {}
    for row in comparison.rows:
        # The recommended one stands out.
        style = "s1" if row.label == chosen else "val"
        if row.samples_per_second is not None:
            rates[row.label] = [Bar("samples per second", row.samples_per_second, style)]
    charts = tag(
        "div",
        bar_chart("Peak of each device in a step", peaks, "bytes"),
        bar_chart("Samples per second", rates, "number"),
        class_="charts",
    )
    return section("Measured", charts)


def _bars_of_peaks(row: Row) -> list[Bar]:
    bars = []
    predicted = row.predicted or {}
    for index, (name, peak) in enumerate(row.peaks.items()):
        # Devices have one colour in all rows.
        style = _STYLES[index % len(_STYLES)]
        bars.append(Bar(f"device {index}", peak, style))
        if name in predicted:
            bars.append(Bar("predicted", predicted[name], "reserved"))
    return bars


def _table(comparison: Comparison, chosen: str | None) -> Markup:
    """Return the table of all strategies; see `_pictures`."""
    texts = [row_texts(row, comparison) for row in comparison.rows]
    heads = ["strategy", *texts[0], "overrides"]
    rows = []
    for row, row_cells in zip(comparison.rows, texts, strict=True):
        label: object = row.label
        if row.label == chosen:
            label = join(row.label, " ", tag("span", "recommended", class_="chip"))
        rows.append([label, *row_cells.values(), " ".join(row.overrides)])
    # Cells of numbers are not broken: peaks of many devices are too long for that.
    numbers = []
    for index, head in enumerate(texts[0], start=1):
        if max(len(row_cells[head]) for row_cells in texts) <= _LONGEST_NUMBER:
            numbers.append(index)
    # Sentences stand outside of the table, whose columns they would squeeze.
    reasons = [hint(line) for line in reasons_in_words(comparison)]
    return section("All strategies", table(heads, rows, numbers=numbers), *reasons)
