"""Gantt chart of a pipeline's step: forwards, backwards and bubbles on each device.

Of several stages on a device later ones are paler.
"""

from equipoise.extensions.common.page.charts import tick_words
from equipoise.extensions.common.page.markup import Markup, cut, figure, legend, picture, tag, word_column
from equipoise.extensions.common.page.scales import Scale, make_scale
from equipoise.extensions.common.timeline import Action, Span
from equipoise.extensions.report.page.record import PipelineStep
from equipoise.formats import format_span

__all__ = ["pipeline_chart"]

# Pixels of a row, between two rows, and below the last row.
_ROW = 30
_GAP = 6
_BOTTOM = 24
# Characters of the longest name of a row.
_LONGEST_NAME = 24
# Opacity of a device's second stage, and of its last.
_PALE = 0.5
_PALEST = 0.3
_PHASES = {"forward": "forward", "backward": "backward", "weights": "gradients of weights"}
# Per cent of the width that a digit needs.
_DIGIT = 0.8
_MOST_BOXES = 1500


def pipeline_chart(step: PipelineStep) -> Markup:
    """Draw a figure."""
    # 1. Choose the axis; times count from the first span.
    timeline = step.timeline
    first = min(span.begin for span in timeline.spans)
    length = timeline.seconds
    across = make_scale([0.0, length], "seconds", tight=True, most=8)
    boxes = [span._replace(begin=span.begin - first, end=span.end - first) for span in timeline.spans[:_MOST_BOXES]]
    row_kind = "device" if timeline.stages_per_device > 1 else "stage"
    title = _title(step)
    rows = range(timeline.devices)
    height = len(rows) * (_ROW + _GAP)
    # 2. Draw. The rows show the time in which devices wait; the boxes lie on them.
    boxes_of_rows = picture(
        f"{title}: when each {row_kind} computed which micro-batch, in {format_span(length)}",
        *(tag("rect", x="0", y=_top(row), width="100%", height=_ROW, class_="waiting") for row in rows),
        *(_box(span, step, across) for span in boxes),
        tick_words(across, height + 12),
        class_="gantt",
        height=height + _BOTTOM,
    )
    # 3. Put title, legend and picture together.
    note = f"idle {timeline.idle:.0%} of {format_span(length)}"
    if len(boxes) < len(timeline.spans):
        note += f"; the first {len(boxes):,} of {len(timeline.spans):,} boxes"
    words = [(cut(_named(f"{row_kind} {row}", step, row), _LONGEST_NAME), _baseline(row)) for row in rows]
    axes = tag("div", word_column(words, height + _BOTTOM), boxes_of_rows, class_="axes")
    return figure(title, axes, note=note, names=_legend(step))


def _named(row: str, step: PipelineStep, device: int) -> str:
    """Return the name of a row or a stage, with that of its device if it is known."""
    if not step.devices:
        return row
    return f"{row}, {step.devices[device]}"


def _title(step: PipelineStep) -> str:
    timeline = step.timeline
    batches = len({span.action.micro_batch for span in timeline.spans})
    stages = _count(timeline.stages, "stage")
    if timeline.stages_per_device > 1:
        stages += f" on {_count(timeline.devices, 'device')}"
    return f"{step.schedule}, {stages}, {_count(batches, 'micro-batch')}".removeprefix(", ")


def _count(number: int, noun: str) -> str:
    if number == 1:
        return f"{number} {noun}"
    ending = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{ending}"


def _top(row: int) -> int:
    return row * (_ROW + _GAP)


def _baseline(row: int) -> int:
    """Return the baseline of a word in the middle of a row."""
    return _top(row) + _ROW // 2 + 4


def _legend(step: PipelineStep) -> Markup:
    phases = {_phase(span.action) for span in step.timeline.spans}
    # Only a schedule that splits its backward has gradients of weights.
    entries = [(f"p-{phase}", name) for phase, name in _PHASES.items() if phase in phases]
    entries.append(("waits", "idle"))
    further = []
    if step.timeline.stages_per_device > 1:
        further.append(tag("li", "paler: later stages"))
    return legend(entries, *further)


def _phase(action: Action) -> str:
    if action.weights:
        return "weights"
    if action.backward:
        return "backward"
    return "forward"


def _box(span: Span, step: PipelineStep, across: Scale) -> Markup:
    """Draw a span, with the number of its micro-batch if there is room."""
    # Stages lie on the devices in turn: `earlier` stages of the same device come before this one.
    earlier, row = divmod(span.stage, step.timeline.devices)
    left = 100 * across.place(span.begin)
    right = 100 * across.place(span.end)
    number = str(span.action.micro_batch)
    # Half a digit of room stays free beside the number.
    number_element = None
    if right - left >= _DIGIT * (len(number) + 0.5):
        number_element = tag(
            "text",
            number,
            x=f"{(left + right) / 2:.2f}%",
            y=_baseline(row),
            text_anchor="middle",
        )
    rectangle = tag(
        "rect",
        x=f"{left:.3f}%",
        y=_top(row),
        width=f"{right - left:.3f}%",
        height=_ROW,
        fill_opacity=_opacity(earlier, step.timeline.stages_per_device),
    )
    phase = _phase(span.action)
    stage = _named(f"stage {span.stage}", step, row)
    description = f"{stage}: {_PHASES[phase]} of micro-batch {number}, {format_span(span.end - span.begin)}"
    later = " later" if earlier else ""
    return tag(
        "g",
        tag("title", description),
        rectangle,
        number_element,
        class_=f"cell bar{later} p-{phase}",
    )


def _opacity(earlier: int, stages_per_device: int) -> str | None:
    """Return the opacity of a device's stage after `earlier` ones; None for its first."""
    if not earlier:
        return None
    # The opacity falls evenly from the second stage to the last.
    fading = (_PALE - _PALEST) / max(1, stages_per_device - 2)
    return f"{_PALE - fading * (earlier - 1):.2f}"
