"""The page of a comparison: speed, memory by device, and a table of all strategies."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from equipoise.extensions.comparison.page.bars import Bar, BarGroup, bar_chart
from equipoise.extensions.report.page.markup import Markup, hint, join, section, table, tag
from equipoise.extensions.report.page.page import facts_section, html_page
from equipoise.extensions.report.page.sections import configuration_section

__all__ = ["ComparedStrategy", "ComparisonRecord", "reasons_in_words", "render_comparison"]

# Colours of devices.
_STYLES = ("val", "s0", "s1", "s2", "s3", "s4", "s5")
# Characters of a cell that stays in one line.
_LONGEST_NUMBER = 24


@dataclass(frozen=True, kw_only=True)
class ComparedStrategy:
    """A strategy and what was measured of it.

    Attributes:
        label: Its name.
        cells: The cells of its row, by the heads of the table.
        rate: Samples per second; None if unknown.
        peaks: The peak of each device in bytes, by name.
        predicted: The predicted peaks. Default: none.
        reason: The reason why it did not run. Default: none, it has run.
        is_recommended: Whether it is the recommended one. Default: False.
    """

    label: str
    cells: Mapping[str, str]
    rate: float | None
    peaks: Mapping[str, int]
    predicted: Mapping[str, int] = field(default_factory=dict)
    reason: str | None = None
    is_recommended: bool = False


@dataclass(frozen=True, kw_only=True)
class ComparisonRecord:
    """Facts of a comparison, from which its page is drawn.

    Attributes:
        title: Name of the module.
        written: Time of the page.
        outcome: "finished" or "interrupted".
        facts: Names and values for the top of the page.
        strategies: The strategies, in order.
        recommendation: The recommendation in sentences; empty without one.
        overrides: The overrides that choose it, in one text.
        notes: What the figures do and do not tell.
        configuration: The configuration as YAML.
    """

    title: str
    written: datetime
    outcome: str
    facts: Mapping[str, str]
    strategies: Sequence[ComparedStrategy]
    recommendation: str = ""
    overrides: str = ""
    notes: Sequence[str] = ()
    configuration: str = ""


def render_comparison(record: ComparisonRecord) -> str:
    """Return the HTML of the page.

    Args:
        record: The facts of the comparison.

    Example:
        >>> record = ComparisonRecord(
        ...     title="Net", written=datetime(2026, 1, 1), outcome="finished", facts={}, strategies=[]
        ... )
        >>> render_comparison(record)[:15]
        '<!DOCTYPE html>'
    """
    return html_page(f"{record.title}: strategies compared", _header(record), _sections(record))


def _header(record: ComparisonRecord) -> Markup:
    time = f"{record.written:%d %b %Y, %H:%M}"
    pill = tag("span", record.outcome, class_=f"pill {record.outcome}")
    over = tag("p", "Strategies compared", class_="over")
    return tag(
        "header",
        over,
        tag("h1", record.title, " ", pill),
        tag("p", time),
    )


def _sections(record: ComparisonRecord) -> Iterator[Markup | None]:
    yield facts_section(record.facts)
    yield _recommendation(record)
    yield _pictures(record.strategies)
    yield _table(record.strategies)
    if record.notes:
        notes = [hint(note) for note in record.notes]
        yield section("What these figures tell", *notes)
    yield configuration_section(record.configuration)


def _recommendation(record: ComparisonRecord) -> Markup | None:
    if not record.recommendation:
        return None
    sentences = tag("p", record.recommendation)
    overrides = hint(tag("code", record.overrides))
    return section("Recommended", sentences, overrides)


def _pictures(strategies: Sequence[ComparedStrategy]) -> Markup:
    if not any(strategy.peaks for strategy in strategies):
        return section("Measured", hint("No strategy has run."))
    peaks = [_peaks(strategy) for strategy in strategies]
    rates = [_rate(strategy) for strategy in strategies]
    charts = tag(
        "div",
        bar_chart("Peak of each device in a step", peaks, "bytes"),
        bar_chart("Samples per second", rates, "number"),
        class_="charts",
    )
    return section("Measured", charts)


def _rate(strategy: ComparedStrategy) -> BarGroup:
    if strategy.rate is None:
        return BarGroup(strategy.label, [])
    # The recommended one stands out.
    style = "val"
    if strategy.is_recommended:
        style = "s1"
    bar = Bar("samples per second", strategy.rate, style)
    return BarGroup(strategy.label, [bar])


def _peaks(strategy: ComparedStrategy) -> BarGroup:
    bars = []
    for index, (name, peak) in enumerate(strategy.peaks.items()):
        # Devices have one colour in all rows.
        style = _STYLES[index % len(_STYLES)]
        measured = Bar(f"device {index}", peak, style)
        bars.append(measured)
        predicted = strategy.predicted.get(name)
        if predicted is not None:
            expected = Bar("predicted", predicted, "reserved")
            bars.append(expected)
    return BarGroup(strategy.label, bars)


def _table(strategies: Sequence[ComparedStrategy]) -> Markup | None:
    if not strategies:
        return None
    heads = list(strategies[0].cells)
    rows = []
    for strategy in strategies:
        cells: list[object] = [strategy.cells[head] for head in heads]
        if strategy.is_recommended:
            chip = tag("span", "recommended", class_="chip")
            cells[0] = join(strategy.label, " ", chip)
        rows.append(cells)
    # Cells of numbers are not broken: peaks of many devices are too long for that.
    numbers = []
    for index, head in enumerate(heads):
        longest = max(len(strategy.cells[head]) for strategy in strategies)
        if head not in ("strategy", "overrides") and longest <= _LONGEST_NUMBER:
            numbers.append(index)
    # Sentences stand outside of the table, whose columns they would squeeze.
    reasons = [hint(line) for line in reasons_in_words([(each.label, each.reason) for each in strategies])]
    return section("All strategies", table(heads, rows, numbers=numbers), *reasons)


def reasons_in_words(reasons: Sequence[tuple[str, str | None]]) -> list[str]:
    """Return a sentence for each reason why strategies did not run, with all strategies that have the same one.

    Args:
        reasons: The name of each strategy, and its reason; None if it has run.

    Example:
        >>> reasons_in_words([("single_device", None), ("dp", "one device"), ("ddp", "one device")])
        ['dp, ddp did not run: one device']
    """
    labels: dict[str, list[str]] = {}
    for label, reason in reasons:
        if reason is not None:
            labels.setdefault(reason, []).append(label)
    return [f"{', '.join(names)} did not run: {reason}" for reason, names in labels.items()]
