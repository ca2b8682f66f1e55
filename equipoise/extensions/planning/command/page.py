"""The page of a plan: the peak of each strategy over the batch size, and a table."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from equipoise.extensions.planning.command.rows import HEADS, WORDS, lines_of, recommended, rows_of
from equipoise.extensions.report.page.charts import Boundary, Line, line_chart
from equipoise.extensions.report.page.markup import Markup, hint, section, table
from equipoise.extensions.report.page.page import facts_section, html_page, page_header, recommendation_section
from equipoise.formats import format_bytes

__all__ = ["plan_page"]

# Colours of strategies.
_STYLES = ("val", "s0", "s1", "s2", "s3", "s4", "s5", "train")


def plan_page(plan: Mapping[str, Any]) -> str:
    """Return the HTML of a plan.

    Args:
        plan: The plan, as the process of the command has made it.
    """
    header = page_header("Memory plan", plan["title"], datetime.now())
    return html_page(f"{plan['title']}: memory plan", header, _sections(plan))


def _sections(plan: Mapping[str, Any]) -> Iterator[Markup | None]:
    recommendation = plan["recommendation"]
    yield facts_section({"samples of a batch": str(plan["batch_size"]), "step": plan["method"]})
    yield recommendation_section(recommended(recommendation), recommendation["overrides"])
    yield _picture(plan)
    # Numbers stand at the right of their columns.
    numbers = [index for index, head in enumerate(HEADS) if head not in WORDS]
    yield section("All strategies", table(HEADS, rows_of(plan), numbers=numbers))
    notes = lines_of(plan)
    if notes:
        yield section("What these figures rest on", *(hint(note) for note in notes))


def _picture(plan: Mapping[str, Any]) -> Markup:
    """Draw a line for each strategy, and one for the limit of each kind of device."""
    curves = plan["curves"]
    if not curves:
        return section("Memory", hint("No strategy is predicted."))
    # 1. The strategies, one of which stands out by its name.
    lines = []
    for index, (name, peaks) in enumerate(curves.items()):
        label = name
        if name == plan["recommendation"]["strategy"]:
            label = f"{name} (recommended)"
        style = _STYLES[index % len(_STYLES)]
        lines.append(Line(label=label, style=style, points=sorted(peaks.items())))

    # 2. The limits, from the first batch size to the last.
    sizes = [size for peaks in curves.values() for size in peaks]
    ends = (min(sizes), max(sizes))
    limits: dict[str, int] = {}
    for entry in plan["strategies"]:
        limits |= {device["name"]: device["usable"] for device in entry["devices"]}
    for limit in sorted(set(limits.values())):
        names = [name for name, nbytes in limits.items() if nbytes == limit]
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
        boundaries=[Boundary(x=plan["batch_size"], text="configured")],
        height=320,
        from_zero=True,
    )
    return section("Memory", chart)
