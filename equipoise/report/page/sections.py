"""Sections of a report, each with its text where there is nothing to show."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import cycle

from equipoise.memory.devices import DeviceInfo, format_bytes
from equipoise.memory.records import CATEGORIES, Composition, MemoryPoint, TensorRecord
from equipoise.report.page.charts import Boundary, Line, Mark, line_chart
from equipoise.report.page.gantt import pipeline_chart
from equipoise.report.page.markup import Markup, join, tag
from equipoise.report.page.record import PipelineStep, RunEvent
from equipoise.report.page.scales import Point, format_count, format_span
from equipoise.report.page.treemap import style_of, tree_map

__all__ = [
    "configuration_section",
    "curves_section",
    "devices_section",
    "events_section",
    "memory_section",
    "peak_section",
    "pipeline_section",
    "throughput_section",
]

_PHASES = ("batch to device", "forward", "backward", "optimizer step", "evaluation")
_POINTS = 1000  # of a line; fewer where there are many lines:
_ALL_POINTS = 9_000  # of the lines of a section
_MOST_EPOCHS = 5  # of which the end is marked
_MOST_CHARTS, _MOST_MAPS, _MOST_EVENTS, _MOST_MARKS, _LARGEST = 24, 8, 200, 40, 10


def _section(title: str, *content: Markup | None, note: str = "") -> Markup:
    heading = tag("h2", title, tag("span", note, class_="note") if note else None)
    return tag("section", heading, *content)


def _hint(*content: object) -> Markup:
    return tag("p", *content, class_="hint")


# Curves.


def curves_section(
    curves: Mapping[str, Mapping[str, Mapping[float, float]]], epoch_ends: Mapping[int, int] | None = None
) -> Markup:
    """A figure for everything that was measured, by steps; with the ends of some epochs."""
    shown = {name: members for name, members in curves.items() if any(members.values())}
    if not shown:
        return _section("Learning curves", _hint("Nothing was logged yet."))
    chosen = list(shown.items())[:_MOST_CHARTS]
    lines = sum(len(members) for _, members in chosen)
    most = max(20, min(_POINTS, _ALL_POINTS // lines))
    boundaries = _epoch_boundaries(epoch_ends or {})
    steps = [step for _, members in chosen for curve in members.values() for step in curve]
    # All figures have one axis across, so that what happened at one step stands at one place.
    span = (min(steps), max(steps))
    figures = [_family(name, members, most, boundaries, span) for name, members in chosen]
    note = "by step" + (f"; {len(chosen)} of {len(shown)} shown" if len(shown) > len(chosen) else "")
    return _section("Learning curves", tag("div", *figures, class_="charts"), note=note)


def _epoch_boundaries(epoch_ends: Mapping[int, int]) -> list[Boundary]:
    """The ends of epochs, as many as there is room for, at round numbers of epochs."""
    if not epoch_ends:
        return []
    last = max(epoch_ends)
    every = next(
        size * 10**power for power in range(20) for size in (1, 2, 5) if last <= _MOST_EPOCHS * size * 10**power
    )
    return [
        Boundary(x=step, text=f"epoch {epoch:,}") for epoch, step in sorted(epoch_ends.items()) if epoch % every == 0
    ]


def _family(
    name: str,
    members: Mapping[str, Mapping[float, float]],
    most: int,
    boundaries: Sequence[Boundary],
    span: tuple[float, float],
) -> Markup:
    spare = cycle(f"s{number}" for number in range(6))
    lines = []
    # Training lies below: where the two meet, validation is what one looks for.
    for where, curve in sorted(members.items(), key=lambda item: item[0] != "train"):
        if curve:
            alone = len(members) == 1 and where != "train"
            style = where if where in ("train", "val") else "val" if alone else next(spare)
            points = sorted(curve.items())
            lines.append(Line(label=where or name, style=style, points=points, value=format_count(points[-1][1])))
    return line_chart(
        name,
        lines,
        x="step",
        y="number",
        boundaries=boundaries,
        span=span,
        log="loss" in name.lower(),
        most_points=most,
    )


# What is told over time.


def throughput_section(points: Sequence[Point], unit: str, events: Sequence[RunEvent], end: float) -> Markup:
    """How fast the run was."""
    if not points:
        return _section("Throughput", _hint("Training ended before there was anything to measure."))
    line = Line(label=unit, style="val", points=points)
    span = (0.0, max(end, points[-1][0]))
    chart = line_chart(
        unit.capitalize(), [line], x="seconds", y="number", marks=_marks(events), span=span, from_zero=True, height=170
    )
    return _section("Throughput", tag("div", chart, class_="charts one"), note="training only, over time")


def _marks(events: Sequence[RunEvent]) -> list[Mark]:
    known = [event for event in events if event.seconds is not None]
    chosen = known[:: max(1, -(-len(known) // _MOST_MARKS))]
    return [
        Mark(
            x=event.seconds,
            style=_kind(event.kind),
            text=f"{event.kind} at {format_span(event.seconds)}: {event.text}"[:160],
        )
        for event in chosen
        if event.seconds is not None
    ]


def _kind(kind: str) -> str:
    return "e-" + (re.sub(r"[^a-z]+", "-", kind.lower()).strip("-") or "other")


# Memory.


def memory_section(points: Sequence[MemoryPoint], events: Sequence[RunEvent]) -> Markup:
    """For each device the peak of each phase, over time."""
    if not points:
        return _section(
            "Memory", _hint("No reading of memory: add ", tag("code", "MemoryLogger()"), " to the callbacks.")
        )
    devices: dict[str, list[MemoryPoint]] = defaultdict(list)
    for point in points:
        devices[point.device].append(point)
    chosen = list(devices.items())[:_MOST_CHARTS]
    lines = sum(len({point.phase for point in readings}) + 1 for _, readings in chosen)
    most = max(20, min(_POINTS, _ALL_POINTS // lines))
    span = (0.0, max(point.seconds for point in points))
    marks = _marks(events) if len(chosen) <= 8 else []
    figures = [_device(device, readings, marks, span, most) for device, readings in chosen]
    note = "the largest in each phase, over time"
    if len(devices) > len(chosen):
        note += f"; {len(chosen)} of {len(devices)} devices shown"
    return _section("Memory", tag("div", *figures, class_="charts one" if len(chosen) == 1 else "charts"), note=note)


def _device(
    device: str, readings: Sequence[MemoryPoint], marks: Sequence[Mark], span: tuple[float, float], most: int
) -> Markup:
    phases: dict[str, list[Point]] = defaultdict(list)
    for point in readings:
        phases[point.phase].append((point.seconds, float(_height(point))))
    known = {phase: phases.pop(phase) for phase in _PHASES if phase in phases}
    lines = []
    reserved = [(point.seconds, float(point.reserved)) for point in readings if point.reserved is not None]
    if reserved:
        lines.append(Line(label="reserved", style="reserved", points=reserved, value=_most(reserved)))
    for phase, line in {**known, **phases}.items():
        style = "p-" + phase.replace(" ", "-") if phase in _PHASES else "p-other"
        lines.append(Line(label=phase, style=style, points=line, value=_most(line)))
    top = max(readings, key=_height)
    note = f"peak {format_bytes(_height(top))}, {top.phase} of step {top.step:,}"
    return line_chart(
        device, lines, x="seconds", y="bytes", note=note, marks=marks, span=span, from_zero=True, most_points=most
    )


def _height(point: MemoryPoint) -> int:
    return point.allocated if point.peak is None else point.peak


def _most(line: Sequence[Point]) -> str:
    return format_bytes(max(y for _, y in line))


def peak_section(compositions: Sequence[Composition], *, expected: bool) -> Markup | None:
    """A tree map for each device, the fullest open."""
    if not compositions:
        way = "MemoryLogger(detail='modules')"
        return (
            _section("The peak", _hint("What it was made of is told by ", tag("code", way), ".")) if expected else None
        )
    ordered = sorted(compositions, key=lambda composition: -composition.nbytes)
    chosen = ordered[:_MOST_MAPS]
    less = min(1.0, 4 / len(chosen))
    maps = [_peak(each, less if index else 1.0, first=not index) for index, each in enumerate(chosen)]
    note = "by module; areas in proportion to bytes"
    if len(ordered) > len(maps):
        note += f"; the fullest {len(maps)} of {len(ordered)} devices"
    return _section("The peak", *maps, note=note)


def _peak(composition: Composition, detail: float, *, first: bool) -> Markup:
    what = f"{composition.phase} of step {composition.step:,}"
    heading = (tag("b", composition.device), " ", format_bytes(composition.nbytes), tag("span", what, class_="note"))
    content = (_categories(composition), tree_map(composition, detail), _table_of_largest(composition.holders))
    return tag("details", tag("summary", *heading), *content, class_="peak", open="" if first else None)


def _categories(composition: Composition) -> Markup:
    """How much each category took: names and bytes."""
    sizes = dict.fromkeys(CATEGORIES, 0)
    for holder in composition.holders:
        sizes[holder.category] += holder.nbytes
    total = max(sum(sizes.values()), 1)
    entries = [
        tag(
            "li",
            tag("i", class_=f"key {style_of(name)}"),
            name,
            " ",
            tag("b", format_bytes(size)),
            f" {_percent(size, total)}",
        )
        for name, size in sorted(sizes.items(), key=lambda item: -item[1])
        if size
    ]
    return tag("ul", *entries, class_="legend")


def _percent(part: int, total: int) -> str:
    return "<1%" if 200 * part < total else f"{100 * part / total:.0f}%"


def _table_of_largest(holders: Sequence[TensorRecord]) -> Markup | None:
    largest = sorted(holders, key=lambda holder: -holder.nbytes)[:_LARGEST]
    if not largest:
        return None
    rows = [
        (
            holder.module or "(root)",
            holder.name,
            holder.category,
            f"{holder.dtype} {list(holder.shape)}",
            format_bytes(holder.nbytes),
        )
        for holder in largest
    ]
    table = _table(("Module", "Tensor", "Category", "Type and shape", "Size"), rows, right=(4,))
    return tag("details", tag("summary", f"The largest {len(rows)}" if len(rows) > 1 else "The largest"), table)


def pipeline_section(step: PipelineStep | None) -> Markup | None:
    """When each stage computed what."""
    if step is None or not step.spans:
        return None
    hint = _hint(step.note) if step.note else None
    chart = tag("div", pipeline_chart(step), class_="charts one")
    return _section("The pipeline", chart, hint, note="the last step as it ran; boxes are micro-batches")


# Lists.


def _table(heads: Sequence[str], rows: Sequence[Sequence[object]], right: Sequence[int] = ()) -> Markup:
    """A table; in the columns `right` there are numbers."""
    style = ["number" if index in right else None for index in range(len(heads))]
    head = tag("tr", *(tag("th", name, scope="col", class_=style[index]) for index, name in enumerate(heads)))
    body = [tag("tr", *(tag("td", cell, class_=style[index]) for index, cell in enumerate(row))) for row in rows]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body)), class_="scroll")


def events_section(events: Sequence[RunEvent]) -> Markup | None:
    """What happened; nothing where nothing did."""
    if not events:
        return None
    half = _MOST_EVENTS // 2
    shown = list(events) if len(events) <= _MOST_EVENTS else [*events[:half], *events[-half:]]
    rows = [
        (
            "" if event.seconds is None else format_span(event.seconds),
            "" if event.step is None else f"{event.step:,}",
            tag("span", event.kind, class_=f"chip {_kind(event.kind)}"),
            event.text[:2000],
        )
        for event in shown
    ]
    note = f"the first and the last {half} of {len(events):,}" if len(events) > len(shown) else f"{len(events)}"
    return _section("Events", _table(("After", "Step", "Kind", "What happened"), rows, right=(0, 1)), note=note)


def devices_section(devices: Sequence[DeviceInfo]) -> Markup | None:
    """What the run had."""
    if not devices:
        return None
    rows = [
        (
            info.device,
            info.name,
            format_bytes(info.memory_total),
            "" if info.memory_free is None else format_bytes(info.memory_free),
            "" if info.cores is None else f"{info.cores:,}",
            ".".join(map(str, info.compute_capability or ())),
        )
        for info in devices
    ]
    heads = ("Device", "Name", "Memory", "Free when it began", "Cores", "Compute capability")
    shown = len(heads) if any(row[-1] for row in rows) else len(heads) - 1
    return _section("Devices", _table(heads[:shown], [row[:shown] for row in rows], right=(2, 3, 4, 5)))


def configuration_section(text: str) -> Markup | None:
    """The configuration; keys stand out."""
    if not text.strip():
        return None
    lines = text.splitlines()
    shown = lines[:1000]
    if len(lines) > len(shown):
        shown.append(f"# … {len(lines) - len(shown):,} more lines")
    long = " long" if len(shown) > 24 else ""
    body = tag("pre", join(*(_coloured(line) for line in shown)), class_=f"configuration{long}")
    return _section("Configuration", body)


def _coloured(line: str) -> Markup:
    match = re.match(r"(\s*(?:- )?)([\w.\-/]+:)(?=\s|$)(.*)", line[:1000], re.DOTALL)
    content = (match[1], tag("span", match[2], class_="name"), match[3]) if match else (line[:1000],)
    return tag("span", *content, "\n")
