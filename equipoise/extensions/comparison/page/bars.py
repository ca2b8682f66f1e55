"""Bar charts, as SVG: a group of bars for each row, their lengths in proportion to the values."""

from collections.abc import Sequence
from dataclasses import dataclass

from equipoise.extensions.report.page.markup import Markup, tag
from equipoise.formats import Unit, format_quantity

__all__ = ["Bar", "BarGroup", "bar_chart"]

# Pixels of a bar, between two bars of a group, and between two groups.
_BAR = 16
_GAP = 3
_GROUP_GAP = 14
# Per cent of the width for the longest bar; the values stand behind the bars.
_LONGEST = 70.0
# Width of a character of a name in pixels.
_CHARACTER = 7.0


@dataclass(frozen=True)
class Bar:
    """A bar.

    Attributes:
        label: Its name, for the legend and the pointer.
        value: Its value, at least 0.
        style: Its CSS class, which determines the colour.
    """

    label: str
    value: float
    style: str


@dataclass(frozen=True)
class BarGroup:
    """The bars of a row.

    Attributes:
        label: Name of the row.
        bars: Its bars.
    """

    label: str
    bars: Sequence[Bar]


def bar_chart(title: str, groups: Sequence[BarGroup], unit: Unit, note: str = "") -> Markup:
    """Draw a figure: its title, the names of its bars, the bars.

    Args:
        title: Name of the measured quantity.
        groups: The rows; those without bars are left out.
        unit: Unit of the values.
        note: Text beside the title. Default: none.
    """
    drawn = [group for group in groups if group.bars]
    largest = 0.0
    for group in drawn:
        for bar in group.bars:
            largest = max(largest, bar.value)
    # 1. The bars, from top to bottom.
    rows = []
    top = 0
    for group in drawn:
        rows += [_bar(bar, top + index * (_BAR + _GAP), largest, unit) for index, bar in enumerate(group.bars)]
        top += _height(group) + _GROUP_GAP
    # The title tells those who cannot see the picture what it shows.
    labels = ", ".join(group.label for group in drawn)
    picture = tag(
        "svg",
        tag("title", f"{title}: {labels}"),
        *rows,
        class_="bars",
        role="img",
        height=max(top, 1),
    )
    axes = tag("div", _names(drawn, max(top, 1)), picture, class_="axes")
    # 2. The title and the names of the bars.
    note_element = None
    if note:
        note_element = tag("span", note, class_="note")
    heading = tag("h3", title, note_element)
    head = tag("figcaption", heading, _legend(drawn))
    return tag("figure", head, axes, class_="chart")


def _height(group: BarGroup) -> int:
    """Return the pixels of a group."""
    return len(group.bars) * (_BAR + _GAP)


def _legend(groups: Sequence[BarGroup]) -> Markup | None:
    """Return the names of the bars, if a group has several."""
    styles = {}
    for group in groups:
        if len(group.bars) < 2:
            continue
        for bar in group.bars:
            styles[bar.label] = bar.style
    if not styles:
        return None
    entries = []
    for label, style in styles.items():
        # The style sheet colours the key as it does the bar.
        key = tag("i", class_=f"key {style}")
        entry = tag("li", key, label)
        entries.append(entry)
    return tag("ul", *entries, class_="legend")


def _names(groups: Sequence[BarGroup], height: int) -> Markup:
    """Draw the names of the groups: a column of its own, as wide as the longest."""
    longest = max((len(group.label) for group in groups), default=0)
    width = 10 + round(_CHARACTER * longest)
    texts = []
    top = 0
    for group in groups:
        # The name stands beside the middle of its bars.
        middle = top + _height(group) / 2
        texts.append(tag("text", group.label, x=width - 8, y=middle + 3, text_anchor="end"))
        top += _height(group) + _GROUP_GAP
    return tag("svg", *texts, class_="names", width=width, height=height, aria_hidden="true")


def _bar(bar: Bar, top: int, largest: float, unit: Unit) -> Markup:
    length = 0.0
    if largest > 0:
        length = _LONGEST * bar.value / largest
    text = format_quantity(bar.value, unit)
    # The text under the pointer names the bar, too.
    tip = tag("title", f"{bar.label}: {text}")
    rectangle = tag(
        "rect",
        x=0,
        y=top,
        width=f"{length:.2f}%",
        height=_BAR,
        rx=2,
    )
    value = tag(
        "text",
        text,
        x=f"{length + 1:.2f}%",
        y=top + _BAR - 4,
        class_="value",
    )
    return tag(
        "g",
        tip,
        rectangle,
        value,
        class_=f"bar {bar.style}",
    )
