"""The page of a plan: the peak of each strategy over the batch size, and a table."""

from collections.abc import Iterator, Mapping
from typing import Any

from equipoise.extensions.common.page.charts import Boundary, Line, line_chart
from equipoise.extensions.common.page.markup import Markup, hint, section, table
from equipoise.extensions.common.page.page import facts_section, html_page, page_header, recommendation_section
from equipoise.extensions.planning.command.rows import HEADS, WORDS, lines_of, recommended, rows_of
from equipoise.formats import format_bytes

__all__ = ["plan_page"]

# Colours of strategies.
_STYLES = ("val", "s0", "s1", "s2", "s3", "s4", "s5", "train")


def plan_page(plan: Mapping[str, Any]) -> str:
    """Return the HTML of a plan."""
    name = plan["title"]
    return html_page(f"{name}: memory plan", page_header("Memory plan", name), _sections(plan))


def _sections(plan: Mapping[str, Any]) -> Iterator[Markup | None]:
    # 1. The facts and the recommendation.
    yield facts_section({"samples of a batch": str(plan["batch_size"]), "step": plan["method"]})
    recommendation = plan["recommendation"]
    yield recommendation_section(recommended(recommendation), recommendation["overrides"])

    # 2. The strategies. Numbers stand at the right of their columns.
    yield _picture(plan)
    numbers = [index for index, head in enumerate(HEADS) if head not in WORDS]
    yield section("All strategies", table(HEADS, rows_of(plan), numbers=numbers))

    # 3. What the user must know beside them.
    notes = [hint(line) for line in lines_of(plan)]
    if notes:
        yield section("What these figures rest on", *notes)


def _picture(plan: Mapping[str, Any]) -> Markup:
    """Draw a line for each strategy, and one for the limit of each kind of device."""
    curves = plan["curves"]
    if not curves:
        return section("Memory", hint("No strategy is predicted with several batch sizes."))
    # 1. The strategies, one of which stands out by its name.
    lines = []
    recommended_name = plan["recommendation"]["strategy"]
    for index, (name, peaks) in enumerate(curves.items()):
        label = name
        if name == recommended_name:
            label = f"{name} (recommended)"
        style = _STYLES[index % len(_STYLES)]
        lines.append(Line(label=label, style=style, points=sorted(peaks.items())))

    # 2. The limits.
    sizes = {size for peaks in curves.values() for size in peaks}
    lines += _limits(plan, min(sizes), max(sizes))

    # 3. The chart.
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


def _limits(plan: Mapping[str, Any], first_size: int, last_size: int) -> list[Line]:
    """Return a line for the limit of each kind of device, from the first batch size to the last."""
    limits = {device["name"]: device["usable"] for entry in plan["strategies"] for device in entry["devices"]}
    lines = []
    for limit in sorted(set(limits.values())):
        text = ", ".join(name for name, nbytes in limits.items() if nbytes == limit)
        line = Line(
            label=f"usable on {text}",
            style="reserved",
            points=[(first_size, limit), (last_size, limit)],
            value=format_bytes(limit),
        )
        lines.append(line)
    return lines
