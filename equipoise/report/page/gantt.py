"""Gantt chart of a pipeline's step: forwards, backwards and bubbles on each device.

Of several stages on a device later ones are paler.
"""

from collections.abc import Sequence

from equipoise.report.page.markup import Markup, join, tag
from equipoise.report.page.record import PipelineStep, StageSpan
from equipoise.report.page.scales import Scale, format_span, format_value, make_scale

__all__ = ["pipeline_chart"]

_ROW, _GAP, _BOTTOM = 30, 6, 24  # pixels: a row, what lies between two, and below the last
_PALE, _PALEST = 0.5, 0.3  # of the colour: a device's second stage, and its last
_PHASES = {"forward": "forward", "backward": "backward", "weights": "gradients of weights"}
_ROOM = 0.8  # per cent of the width that a digit needs
_MOST = 1500  # boxes


def pipeline_chart(step: PipelineStep) -> Markup:
    """Draws a figure.

    Args:
        step: The step; with at least one span.
    """
    begin = min(span.begin for span in step.spans)
    length = max(span.end for span in step.spans) - begin
    across = make_scale([0.0, length], "seconds", tight=True, most=8)
    shown = sorted(step.spans, key=lambda span: span.begin)[:_MOST]
    rows = len(step.rows)
    height = rows * (_ROW + _GAP)
    batches = len({span.micro_batch for span in step.spans})
    what = "device" if step.devices else "stage"
    stages = _count(len(step.stages), "stage") + (f" on {_count(rows, what)}" if step.devices else "")
    title = f"{step.schedule}, {stages}, {_count(batches, 'micro-batch')}".removeprefix(", ")
    picture = tag(
        "svg",
        tag("title", f"{title}: when each {what} computed which micro-batch, in {format_span(length)}"),
        *(tag("rect", x="0", y=_top(row), width="100%", height=_ROW, class_="waiting") for row in range(rows)),
        *(_box(span, begin, across, step) for span in shown),
        _words(across, height),
        class_="gantt",
        role="img",
        height=height + _BOTTOM,
    )
    note = f"idle {step.idle:.0%} of {format_span(length)}"
    if len(shown) < len(step.spans):
        note += f"; the first {len(shown):,} of {len(step.spans):,} boxes"
    head = tag("figcaption", tag("h3", title, tag("span", note, class_="note")), _legend(step))
    return tag("figure", head, tag("div", _labels(step.rows, height), picture, class_="axes"), class_="chart")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}{'es' if what.endswith('ch') else 's'}"


def _top(row: int) -> int:
    return row * (_ROW + _GAP)


def _legend(step: PipelineStep) -> Markup:
    ran = {_phase(span) for span in step.spans}
    styles = [(name, f"p-{phase}") for phase, name in _PHASES.items() if phase in ran]
    entries = [tag("li", tag("i", class_=f"key {style}"), name) for name, style in [*styles, ("idle", "waits")]]
    if step.devices:
        entries.append(tag("li", "paler: later stages"))
    return tag("ul", *entries, class_="legend")


def _phase(span: StageSpan) -> str:
    return "weights" if span.weights else "backward" if span.backward else "forward"


def _box(span: StageSpan, begin: float, across: Scale, step: PipelineStep) -> Markup:
    before, row = divmod(span.stage, len(step.rows))  # so many of the device's stages come before
    fading = (_PALE - _PALEST) / max(1, len(step.stages) // len(step.rows) - 2)
    shade = {"fill_opacity": f"{_PALE - fading * (before - 1):.2f}"} if before else {}
    left, right = (100 * across.place(at - begin) for at in (span.begin, span.end))
    phase, number = _phase(span), str(span.micro_batch)
    told = f"{step.stages[span.stage]}: {_PHASES[phase]} of micro-batch {number}, {format_span(span.end - span.begin)}"
    middle = {"x": f"{(left + right) / 2:.2f}%", "y": _top(row) + _ROW // 2 + 4, "text_anchor": "middle"}
    place = {"x": f"{left:.3f}%", "y": _top(row), "width": f"{right - left:.3f}%", "height": _ROW}
    return tag(
        "g",
        tag("title", told),
        tag("rect", **place, **shade),
        tag("text", number, **middle) if right - left >= _ROOM * (len(number) + 0.5) else None,
        class_=f"cell bar{' later' * bool(before)} p-{phase}",
    )


def _words(across: Scale, height: int) -> Markup:
    """The axis across."""
    words = []
    for index, tick in enumerate(across.ticks):
        place = across.place(tick)
        anchor = "start" if place < 0.04 else "end" if place > 0.96 else "middle"
        style = "odd" if index % 2 else None  # left out where there is little room
        word = format_value(tick, "seconds")
        words.append(tag("text", word, x=f"{100 * place:.2f}%", y=height + 12, text_anchor=anchor, class_=style))
    return join(*words)


def _labels(rows: Sequence[str], height: int) -> Markup:
    """The names of the rows: a column of its own, as wide as its words."""
    words = [name if len(name) <= 24 else f"{name[:23]}…" for name in rows]
    width = 10 + round(6.3 * max(map(len, words)))
    texts = [
        tag("text", word, x=width - 8, y=_top(row) + _ROW // 2 + 4, text_anchor="end") for row, word in enumerate(words)
    ]
    return tag("svg", *texts, class_="labels", width=width, height=height + _BOTTOM, aria_hidden="true")
