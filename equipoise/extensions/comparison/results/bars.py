"""Bar charts, as SVG: a group of bars for each row, their lengths in proportion to the values."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from equipoise.extensions.common.page.markup import Markup, figure, legend, picture, tag, word_column
from equipoise.formats import Unit, format_bytes, format_quantity

__all__ = ["Bar", "bar_chart"]

# Pixels of a bar, between two bars of a group, and between two groups.
_BAR = 16
_GAP = 3
_GROUP_GAP = 14
# Per cent of the width for the longest bar; the values follow the bars.
_LONGEST = 70.0


@dataclass(frozen=True)
class Bar:
    """A bar.

    Attributes:
        label: Its name, for the legend and the pointer.
        value: Its value, at least 0.
        style: Its CSS class, which determines the colour.
        expected: A value that is marked across the bar. Default: none.
    """

    label: str
    value: float
    style: str
    expected: float | None = None


def bar_chart(title: str, groups: Mapping[str, Sequence[Bar]], unit: Unit, note: str = "") -> Markup:
    """Draw a figure: its title, the names of its bars, the bars.

    Args:
        title: Name of the measured quantity.
        groups: The bars of each row, by its name; rows without bars are left out.
        unit: Unit of the values.
        note: Text beside the title. Default: none.
    """
    drawn = {label: bars for label, bars in groups.items() if bars}
    largest = max((max(bar.value, bar.expected or 0.0) for bars in drawn.values() for bar in bars), default=0.0)
    # 1. The bars, from top to bottom. The name of a row stands beside the middle of its bars.
    rows = []
    words = []
    top = 0
    for label, bars in drawn.items():
        rows += [_bar(bar, top + index * (_BAR + _GAP), largest, unit) for index, bar in enumerate(bars)]
        height_of_group = len(bars) * (_BAR + _GAP)
        words.append((label, top + height_of_group / 2 + 3))
        top += height_of_group + _GROUP_GAP
    # 2. The figure.
    height = max(top, 1)
    chart = picture(f"{title}: {', '.join(drawn)}", *rows, class_="bars", height=height)
    axes = tag("div", word_column(words, height), chart, class_="axes rows")
    return figure(title, axes, note=note, names=_legend(drawn.values()))


def _legend(groups: Iterable[Sequence[Bar]]) -> Markup | None:
    """Return the names of the bars, if a group has several."""
    styles: dict[str, str] = {}
    for bars in groups:
        if len(bars) > 1:
            styles |= {bar.label: bar.style for bar in bars}
    if not styles:
        return None
    return legend([(style, label) for label, style in styles.items()])


def _bar(bar: Bar, top: int, largest: float, unit: Unit) -> Markup:
    length = _length(bar.value, largest)
    text = _text(bar.value, unit)
    # The text under the pointer names the bar, too.
    title = f"{bar.label}: {text}"
    mark = None
    end = length
    if bar.expected is not None:
        title += f", predicted {_text(bar.expected, unit)}"
        end = _length(bar.expected, largest)
        x = f"{end:.2f}%"
        mark = tag("line", x1=x, x2=x, y1=top - 1, y2=top + _BAR + 1, class_="expected")
    return tag(
        "g",
        tag("title", title),
        tag("rect", x=0, y=top, width=f"{length:.2f}%", height=_BAR, rx=2),
        mark,
        tag("text", text, x=f"{max(length, end) + 1:.2f}%", y=top + _BAR - 4, class_="value"),
        class_=f"bar {bar.style}",
    )


def _text(value: float, unit: Unit) -> str:
    """Return a value as tables have it; words of an axis lack a zero behind the point."""
    if unit == "bytes":
        return format_bytes(value)
    return format_quantity(value, unit)


def _length(value: float, largest: float) -> float:
    """Return the length of a bar in per cent of the width."""
    if largest <= 0:
        return 0.0
    return _LONGEST * value / largest
