"""Sections of a report about memory: readings over time, and live tensors at the peak."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from equipoise.extensions.common.page.charts import Line, Mark, line_chart
from equipoise.extensions.common.page.markup import Markup, hint, legend, section, table, tag
from equipoise.extensions.common.page.scales import Point
from equipoise.extensions.report.page.record import RunEvent
from equipoise.extensions.report.page.sections import MOST_CHARTS, event_marks, points_per_line
from equipoise.extensions.report.page.treemap import style_of, tree_map
from equipoise.formats import format_bytes
from equipoise.memory.records import CATEGORIES, Composition, MemoryPoint, TensorRecord

__all__ = ["memory_section", "peak_section"]

_PHASES = ("batch to device", "forward", "backward", "optimizer step", "evaluation")
# Of the greatest reading of a device to its least, up to which its chart would be a line.
_FLAT = 1.05
# Events are marked in the charts of at most this number of devices.
_MOST_MARKED_CHARTS = 8
_MOST_MAPS = 8
# Maps that together may have the usual number of cells each.
_DETAILED_MAPS = 4
# Rows of the table of tensors.
_LARGEST = 10


# Readings over time.


def memory_section(points: Sequence[MemoryPoint], events: Sequence[RunEvent]) -> Markup:
    """Draw for each device the peak of each phase, over time."""
    if not points:
        advice = hint("No reading of memory: add ", tag("code", "MemoryLogger()"), " to the callbacks.")
        return section("Memory", advice)
    # 1. Group the readings by device.
    devices: dict[str, list[MemoryPoint]] = defaultdict(list)
    for point in points:
        devices[point.device].append(point)
    flat = {device: readings for device, readings in devices.items() if _is_flat(readings)}
    sentences = [_sentence(device, devices.pop(device)) for device in flat]
    if not devices:
        return section("Memory", *sentences)
    drawn = dict(list(devices.items())[:MOST_CHARTS])
    # 2. Share out the points of the section.
    most_points = points_per_line(sum(_number_of_lines(readings) for readings in drawn.values()))
    # 3. Draw all devices on the same axis across.
    span = (0.0, max(point.seconds for point in points))
    marks: list[Mark] = []
    if len(drawn) <= _MOST_MARKED_CHARTS:
        marks = event_marks(events)
    figures = []
    for device, readings in drawn.items():
        figures.append(_device_chart(device, readings, marks, span, most_points))
    note = "the largest in each phase, over time"
    if len(devices) > len(drawn):
        note += f"; {len(drawn)} of {len(devices)} devices shown"
    style = "charts one" if len(drawn) == 1 else "charts"
    return section("Memory", tag("div", *figures, class_=style), *sentences, note=note)


def _is_flat(readings: Sequence[MemoryPoint]) -> bool:
    """Return whether the readings of a CPU, which keeps no peak, are so near to each other that a chart tells nothing.

    They are those of the whole process, of which a step of a small model is a small part.
    """
    sizes = [point.allocated for point in readings]
    keeps_peak = any(point.peak is not None for point in readings)
    return not keeps_peak and max(sizes) <= _FLAT * min(sizes)


def _sentence(device: str, readings: Sequence[MemoryPoint]) -> Markup:
    """Say what flat readings say."""
    low = format_bytes(min(point.allocated for point in readings))
    high = format_bytes(max(point.allocated for point in readings))
    sizes = low if low == high else f"{low} to {high}"
    return hint(f"{device}: {sizes} in all {len(readings):,} readings, which are those of the whole process.")


def _number_of_lines(readings: Sequence[MemoryPoint]) -> int:
    """Return the number of phases and one more, for reserved memory."""
    return len({point.phase for point in readings}) + 1


def _device_chart(
    device: str,
    readings: Sequence[MemoryPoint],
    marks: Sequence[Mark],
    span: tuple[float, float],
    most_points: int,
) -> Markup:
    lines = []
    reserved = [(point.seconds, float(point.reserved)) for point in readings if point.reserved is not None]
    if reserved:
        lines.append(
            Line(
                label="reserved",
                style="reserved",
                points=reserved,
                value=_maximum(reserved),
            )
        )
    for phase, points in _points_by_phase(readings).items():
        lines.append(
            Line(
                label=phase,
                style=_phase_style(phase),
                points=points,
                value=_maximum(points),
            )
        )
    fullest = max(readings, key=_peak_bytes)
    return line_chart(
        device,
        lines,
        x="seconds",
        y="bytes",
        note=f"peak {format_bytes(_peak_bytes(fullest))}, {fullest.phase} of step {fullest.step:,}",
        marks=marks,
        span=span,
        from_zero=True,
        most_points=most_points,
    )


def _points_by_phase(readings: Sequence[MemoryPoint]) -> dict[str, list[Point]]:
    """Return the peaks of each phase: the phases of a step in their order, then others."""
    phases: dict[str, list[Point]] = defaultdict(list)
    for point in readings:
        phases[point.phase].append((point.seconds, float(_peak_bytes(point))))
    phases_of_step = {phase: phases.pop(phase) for phase in _PHASES if phase in phases}
    return {**phases_of_step, **phases}


def _phase_style(phase: str) -> str:
    if phase not in _PHASES:
        return "p-other"
    return "p-" + phase.replace(" ", "-")


def _peak_bytes(point: MemoryPoint) -> int:
    if point.peak is None:
        return point.allocated
    return point.peak


def _maximum(points: Sequence[Point]) -> str:
    return format_bytes(max(y for _, y in points))


# Live tensors at the peak.


def peak_section(compositions: Sequence[Composition], *, expected: bool) -> Markup | None:
    """Draw a tree map for each device; that of the fullest device is open.

    Args:
        compositions: Live tensors at the peak of each device.
        expected: If there are no compositions, say how to get them.
    """
    if not compositions:
        if not expected:
            return None
        code = tag("code", "MemoryLogger(detail='modules')")
        return section("The peak", hint("Its parts are shown by ", code, "."))
    ordered = sorted(compositions, key=lambda composition: -composition.nbytes)
    drawn = ordered[:_MOST_MAPS]
    # The first map has all details; many others have fewer.
    detail = min(1.0, _DETAILED_MAPS / len(drawn))
    maps = [_peak(drawn[0], 1.0, is_open=True)]
    maps += [_peak(composition, detail, is_open=False) for composition in drawn[1:]]
    note = "by module; areas in proportion to bytes"
    if len(ordered) > len(maps):
        note += f"; the fullest {len(maps)} of {len(ordered)} devices"
    return section("The peak", *maps, note=note)


def _peak(composition: Composition, detail: float, *, is_open: bool) -> Markup:
    summary = tag(
        "summary",
        tag("b", composition.device),
        " ",
        format_bytes(composition.nbytes),
        tag("span", f"{composition.phase} of step {composition.step:,}", class_="note"),
    )
    return tag(
        "details",
        summary,
        _categories(composition),
        tree_map(composition, detail),
        _table_of_largest(composition.holders),
        class_="peak",
        open="" if is_open else None,
    )


def _categories(composition: Composition) -> Markup:
    """Draw the legend: the bytes of each category."""
    sizes = _sizes_by_category(composition)
    total = max(sum(sizes.values()), 1)
    entries = []
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        if size:
            entries.append((style_of(name), name, " ", tag("b", format_bytes(size)), f" {_percent(size, total)}"))
    return legend(entries)


def _sizes_by_category(composition: Composition) -> Mapping[str, int]:
    sizes: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    for record in composition.holders:
        sizes[record.category] += record.nbytes
    return sizes


def _percent(size: int, total: int) -> str:
    if 200 * size < total:
        return "<1%"
    return f"{100 * size / total:.0f}%"


def _table_of_largest(records: Sequence[TensorRecord]) -> Markup | None:
    largest = sorted(records, key=lambda record: -record.nbytes)[:_LARGEST]
    if not largest:
        return None
    rows = []
    for record in largest:
        row = (
            record.module or "(root)",
            record.name,
            record.category,
            f"{record.dtype} {list(record.shape)}",
            format_bytes(record.nbytes),
        )
        rows.append(row)
    summary = "The largest"
    if len(rows) > 1:
        summary += f" {len(rows)}"
    heads = ("Module", "Tensor", "Category", "Type and shape", "Size")
    return tag("details", tag("summary", summary), table(heads, rows, numbers=(4,)))
