"""Sections of a report, each with a text for missing data."""

import base64
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle

from equipoise.extensions.common.page.charts import Boundary, Line, Mark, line_chart
from equipoise.extensions.common.page.markup import Markup, figure, hint, section, table, tag
from equipoise.extensions.common.page.scales import Point
from equipoise.extensions.report.page.gantt import pipeline_chart
from equipoise.extensions.report.page.record import LearningRateSearch, PipelineStep, ReportSection, RunEvent
from equipoise.formats import format_bytes, format_count, format_number, format_span
from equipoise.memory.devices import DeviceInfo

__all__ = [
    "MOST_CHARTS",
    "added_section",
    "curves_section",
    "devices_section",
    "event_marks",
    "events_section",
    "learning_rates_section",
    "pipeline_section",
    "points_per_line",
    "throughput_section",
]

# Charts of a section.
MOST_CHARTS = 24
# Points of a line, and of all lines of a section.
_LINE_POINTS = 1000
_SECTION_POINTS = 9_000
# Epochs of which the end is marked.
_MOST_EPOCHS = 5
_MOST_EVENTS = 200
_MOST_MARKS = 40
# Characters of a mark's text, and of an event's text.
_MARK_TEXT = 160
_EVENT_TEXT = 2000
# Images by the bytes with which they begin.
_IMAGE_KINDS = {
    b"\x89PNG": "png",
    b"\xff\xd8\xff": "jpeg",
    b"GIF8": "gif",
}
# A number with its unit, such as "37.6%" or "2.19 s".
_NUMBER = re.compile(r"-?[\d.,]+(e[+-]?\d+)?( ?[^\W\d]{1,3}| ?%)?|-?")

Curve = Mapping[float, float]


def points_per_line(lines: int) -> int:
    """Return the maximum number of points of a line in a section with this number of lines."""
    return max(20, min(_LINE_POINTS, _SECTION_POINTS // lines))


# Curves.


def curves_section(curves: Mapping[str, Mapping[str, Curve]], epoch_ends: Mapping[int, int] | None = None) -> Markup:
    """Draw a figure for each measured quantity, by steps, with the ends of some epochs.

    Args:
        curves: Values by step, for each quantity and each run stage.
        epoch_ends: The last step of each epoch, by epochs done. Default: none is marked.
    """
    families = {name: members for name, members in curves.items() if any(members.values())}
    if not families:
        return section("Learning curves", hint("Nothing was logged yet."))
    drawn = dict(list(families.items())[:MOST_CHARTS])
    lines = sum(len(members) for members in drawn.values())
    boundaries = _epoch_boundaries(epoch_ends or {})
    # Many lines have fewer points each, so that the page stays small.
    most_points = points_per_line(lines)
    # All figures share one axis across, so that one step stands at one place.
    span = _span_of(drawn)
    figures = []
    for name, members in drawn.items():
        figures.append(_family(name, members, most_points, boundaries, span))
    note = "by step, with the last values"
    if len(families) > len(drawn):
        note += f"; {len(drawn)} of {len(families)} shown"
    return section("Learning curves", tag("div", *figures, class_="charts"), note=note)


def _span_of(families: Mapping[str, Mapping[str, Curve]]) -> tuple[float, float]:
    """Return the first and the last step of all curves."""
    steps: list[float] = []
    for members in families.values():
        for curve in members.values():
            steps += curve
    return min(steps), max(steps)


def _epoch_boundaries(epoch_ends: Mapping[int, int]) -> list[Boundary]:
    """Return the ends of some epochs, at multiples of a round number."""
    if not epoch_ends:
        return []
    stride = _epoch_stride(max(epoch_ends))
    boundaries = []
    for epoch, step in sorted(epoch_ends.items()):
        if epoch % stride == 0:
            boundaries.append(Boundary(x=step, text=f"epoch {epoch:,}"))
    return boundaries


def _epoch_stride(last: int) -> int:
    """Return the least round number of which at most `_MOST_EPOCHS` multiples are up to `last`."""
    power = 1
    while True:
        for size in (1, 2, 5):
            if last <= _MOST_EPOCHS * size * power:
                return size * power
        power *= 10


def _family(
    name: str, members: Mapping[str, Curve], most_points: int, boundaries: Sequence[Boundary], span: tuple[float, float]
) -> Markup:
    """Draw the curves of one quantity."""
    curves = {run_stage: curve for run_stage, curve in members.items() if curve}
    styles = _curve_styles(curves, alone=len(members) == 1)
    lines = []
    # Training lies below: where the two meet, validation is what one looks for.
    for run_stage in sorted(curves, key=lambda run_stage: run_stage != "train"):
        points = sorted(curves[run_stage].items())
        line = Line(label=run_stage or name, style=styles[run_stage], points=points, value=format_count(points[-1][1]))
        lines.append(line)
    return line_chart(
        name,
        lines,
        x="step",
        y="number",
        boundaries=boundaries,
        span=span,
        log="loss" in name.lower(),
        most_points=most_points,
    )


def _curve_styles(run_stages: Iterable[str], *, alone: bool) -> dict[str, str]:
    """Return the CSS class of each curve of a quantity; one that stands alone looks like validation."""
    spare = cycle(f"s{number}" for number in range(6))
    styles = {}
    for run_stage in run_stages:
        if run_stage in ("train", "val"):
            styles[run_stage] = run_stage
        elif alone:
            styles[run_stage] = "val"
        else:
            styles[run_stage] = next(spare)
    return styles


def learning_rates_section(search: LearningRateSearch | None) -> Markup | None:
    """Draw the losses of a search for a learning rate, with the suggested rate."""
    if search is None or not search.points:
        return None
    marks = []
    if search.suggested is not None:
        suggested = format_number(search.suggested)
        marks.append(Mark(x=search.suggested, style="e-suggested", text=f"suggested learning rate: {suggested}"))
    chart = line_chart(
        "Smoothed loss",
        [Line(label="loss by learning rate", style="train", points=search.points)],
        x="number",
        y="number",
        marks=marks,
        height=170,
        log_across=True,
    )
    words = "too few steps for a suggestion"
    if search.suggested is not None:
        words = f"suggested: {suggested}"
    charts = tag("div", chart, class_="charts one")
    return section("The learning rate", charts, note=f"searched before the fit; {words}")


# Throughput and events over time.


def throughput_section(points: Sequence[Point], unit: str, events: Sequence[RunEvent], duration: float) -> Markup:
    """Draw the throughput over time.

    Args:
        points: Seconds since the start, and count per second.
        unit: Unit of the throughput.
        events: Events to mark.
        duration: Duration of the run in seconds.
    """
    if not points:
        return section("Throughput", hint("Training ended before there was anything to measure."))
    line = Line(label=unit, style="val", points=points)
    # The axis ends with the run, also if nothing was counted at its end.
    chart = line_chart(
        unit.capitalize(),
        [line],
        x="seconds",
        y="number",
        marks=event_marks(events),
        span=(0.0, max(duration, points[-1][0])),
        from_zero=True,
        height=170,
    )
    return section("Throughput", tag("div", chart, class_="charts one"), note="training only, over time")


def event_marks(events: Sequence[RunEvent]) -> list[Mark]:
    """Return marks for events; for a regular selection if there are many."""
    marks = []
    for event in events:
        text = f"{event.kind} at {format_span(event.seconds)}: {event.text}"
        marks.append(Mark(x=event.seconds, style=_event_style(event.kind), text=text[:_MARK_TEXT]))
    stride = math.ceil(len(marks) / _MOST_MARKS)
    return marks[:: max(1, stride)]


def _event_style(kind: str) -> str:
    """Return the CSS class of a kind of event."""
    name = re.sub(r"[^a-z]+", "-", kind.lower()).strip("-") or "other"
    return f"e-{name}"


def pipeline_section(step: PipelineStep | None) -> Markup | None:
    """Draw the computations of each stage over time."""
    if step is None or not step.timeline.spans:
        return None
    note_element = None
    if step.note:
        note_element = hint(step.note)
    chart = tag("div", pipeline_chart(step), class_="charts one")
    return section("The pipeline", chart, note_element, note="the last step as it ran; boxes are micro-batches")


# Lists.


def events_section(events: Sequence[RunEvent]) -> Markup | None:
    """List the events, if there are any."""
    if not events:
        return None
    listed = list(events)
    note = f"{len(events)}"
    if len(events) > _MOST_EVENTS:
        half = _MOST_EVENTS // 2
        # The first events tell how it began, the last ones how it ended.
        listed = [*events[:half], *events[-half:]]
        note = f"the first and the last {half} of {len(events):,}"
    rows = [_event_row(event) for event in listed]
    heads = ("After", "Step", "Kind", "What happened")
    return section("Events", table(heads, rows, numbers=(0, 1)), note=note)


def _event_row(event: RunEvent) -> tuple[str, str, Markup, str]:
    chip = tag("span", event.kind, class_=f"chip {_event_style(event.kind)}")
    return format_span(event.seconds), f"{event.step:,}", chip, event.text[:_EVENT_TEXT]


def devices_section(devices: Sequence[DeviceInfo]) -> Markup | None:
    """List the devices of the run."""
    if not devices:
        return None
    rows = [_device_row(info) for info in devices]
    heads = ("Device", "Name", "Memory", "Free when it began", "Cores", "Compute capability")
    columns = len(heads)
    # Only CUDA devices have a compute capability.
    has_capability = any(row[-1] for row in rows)
    if not has_capability:
        columns -= 1
    return section("Devices", table(heads[:columns], [row[:columns] for row in rows], numbers=(2, 3, 4, 5)))


def _device_row(info: DeviceInfo) -> tuple[str, ...]:
    """Return the cells of a device; unknown ones are empty."""
    free = ""
    if info.memory_free is not None:
        free = format_bytes(info.memory_free)
    cores = ""
    if info.cores is not None:
        cores = f"{info.cores:,}"
    capability = ".".join(map(str, info.compute_capability or ()))
    return info.device, info.name, format_bytes(info.memory_total), free, cores, capability


def added_section(added: ReportSection) -> Markup:
    """Show a section of another package."""
    paragraph = None
    if added.text:
        paragraph = tag("p", added.text)
    rows = None
    if added.table:
        heads, *others = added.table
        numbers = [column for column in range(len(heads)) if all(_NUMBER.fullmatch(row[column]) for row in others)]
        rows = table(heads, others, numbers, row_heads=added.row_heads)
    chart = None
    if added.lines:
        styles = cycle(f"s{number}" for number in range(6))
        chart = line_chart(
            f"{added.title} by step",
            [Line(label=name, style=next(styles), points=points) for name, points in added.lines.items()],
            x="step",
            y="number",
            from_zero=True,
        )
    pictures = None
    if added.images:
        drawn = [_picture(name, image) for name, image in added.images.items()]
        pictures = tag("div", *drawn, class_="pictures")
    return section(added.title, paragraph, rows, chart, pictures)


def _picture(name: str, image: bytes) -> Markup | None:
    """Return a figure of an image; None if it is none of the formats that every browser shows."""
    for signature, kind in _IMAGE_KINDS.items():
        if image.startswith(signature):
            text = base64.b64encode(image).decode()
            return figure(name, tag("img", src=f"data:image/{kind};base64,{text}", alt=name))
    return None
