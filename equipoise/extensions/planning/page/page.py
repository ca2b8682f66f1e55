"""The page of a plan: the peak of each strategy over the batch size, and a table."""

from collections.abc import Iterator

from equipoise.extensions.planning.page.record import PlanRecord
from equipoise.extensions.report.page.charts import Boundary, Line, line_chart
from equipoise.extensions.report.page.markup import Markup, hint, section, table, tag
from equipoise.extensions.report.page.page import facts_section, html_page
from equipoise.formats import format_bytes

__all__ = ["render_plan"]

# Colours of strategies.
_STYLES = ("val", "s0", "s1", "s2", "s3", "s4", "s5", "train")
# Columns of the table that hold words.
_WORDS = ("strategy", "device", "at the peak")


def render_plan(record: PlanRecord) -> str:
    """Return the HTML of the page.

    Args:
        record: The facts of the plan.

    Example:
        >>> from datetime import datetime
        >>> record = PlanRecord(title="Net", written=datetime(2026, 1, 1), batch_size=8, limits={}, curves=[])
        >>> render_plan(record)[:15]
        '<!DOCTYPE html>'
    """
    header = tag(
        "header",
        tag("p", "Memory plan", class_="over"),
        tag("h1", record.title),
        tag("p", f"{record.written:%d %b %Y, %H:%M}"),
    )
    return html_page(f"{record.title}: memory plan", header, _sections(record))


def _sections(record: PlanRecord) -> Iterator[Markup | None]:
    yield facts_section(record.facts)
    yield _recommendation(record)
    yield _picture(record)
    # Numbers stand at the right of their columns.
    if record.rows:
        numbers = [index for index, head in enumerate(record.heads) if head not in _WORDS]
        yield section("All strategies", table(record.heads, record.rows, numbers=numbers))
    if record.notes:
        yield section("What these figures rest on", *(hint(note) for note in record.notes))


def _recommendation(record: PlanRecord) -> Markup | None:
    if not record.recommendation:
        return None
    overrides = None
    if record.overrides:
        overrides = hint(tag("code", record.overrides))
    return section("Recommended", tag("p", record.recommendation), overrides)


def _picture(record: PlanRecord) -> Markup:
    """Draw a line for each strategy, and one for the limit of each kind of device."""
    if not record.curves:
        return section("Memory", hint("No strategy is predicted."))
    # 1. The strategies.
    lines = []
    for index, curve in enumerate(record.curves):
        # One of them stands out by its name.
        label = curve.name
        if curve.is_recommended:
            label = f"{curve.name} (recommended)"
        line = Line(
            label=label,
            style=_STYLES[index % len(_STYLES)],
            points=sorted(curve.peaks.items()),
        )
        lines.append(line)

    # 2. The limits, from the first batch size to the last.
    sizes = [size for curve in record.curves for size in curve.peaks]
    ends = (min(sizes), max(sizes))
    limits = set(record.limits.values())
    for limit in sorted(limits):
        names = [name for name, nbytes in record.limits.items() if nbytes == limit]
        line = Line(
            label=f"usable on {', '.join(names)}",
            style="reserved",
            points=[(size, limit) for size in ends],
            value=format_bytes(limit),
        )
        lines.append(line)
    chart = line_chart(
        "Peak of the fullest device",
        lines,
        x="step",
        y="bytes",
        note="by samples of a batch",
        boundaries=[Boundary(x=record.batch_size, text="configured")],
        height=320,
        from_zero=True,
    )
    return section("Memory", chart)
