"""Elements of HTML and SVG; all text in them is escaped."""

import html
import re
from collections.abc import Sequence
from typing import Any

__all__ = ["Markup", "hint", "join", "plain", "section", "table", "tag"]

# Elements without an end tag.
_EMPTY = {"meta", "br"}
# Colours of a terminal.
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# Control characters other than tab and line feed, lone surrogates, and code points that are no characters.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def plain(text: object) -> str:
    """Return a text without characters that HTML forbids: control characters, lone surrogates, terminal colours."""
    lines = str(text).replace("\r\n", "\n")
    without_colours = _COLOURS.sub("", lines)
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", without_colours)


def tag(name: str, /, *content: object, **attributes: Any) -> Markup:
    """Return an element.

    Args:
        name: Its name.
        content: Its children. `Markup` stays as it is, None is left out, anything else is escaped text.
        attributes: Its attributes; `class_` is "class", other underscores are hyphens, None leaves an attribute out.

    Example:
        >>> tag("p", "a < b", tag("b", "!"), class_="x", data_y=1)
        '<p class="x" data-y="1">a &lt; b<b>!</b></p>'
    """
    texts: dict[str, str] = {}
    for keyword, value in attributes.items():
        # An attribute without a value is left out; an empty text is a value.
        if value is not None:
            attribute = keyword.rstrip("_").replace("_", "-")
            texts[attribute] = html.escape(plain(value))
    start = f"<{name}"
    for attribute, text in texts.items():
        start += f' {attribute}="{text}"'
    start += ">"
    if name in _EMPTY:
        return Markup(start)
    return Markup(f"{start}{join(*content)}</{name}>")


def join(*content: object) -> Markup:
    """Concatenate markup; escape any other text, leave out None."""
    texts: list[str] = []
    for child in content:
        if child is None:
            continue
        if isinstance(child, Markup):
            texts.append(child)
        else:
            text = plain(child)
            texts.append(html.escape(text))
    return Markup("".join(texts))


def section(title: str, *content: Markup | None, note: str = "") -> Markup:
    """Return a section with a heading; the note stands beside the title."""
    note_element = None
    if note:
        note_element = tag("span", note, class_="note")
    heading = tag("h2", title, note_element)
    return tag("section", heading, *content)


def hint(*content: object) -> Markup:
    """Return a paragraph for the place of missing data, such as how to get it."""
    return tag("p", *content, class_="hint")


def table(heads: Sequence[str], rows: Sequence[Sequence[object]], numbers: Sequence[int] = ()) -> Markup:
    """Return a table that scrolls where it is too wide.

    Args:
        heads: The heads of the columns.
        rows: The cells of each row.
        numbers: Indices of the columns that hold numbers. Default: none.
    """
    # The style sheet aligns columns of numbers to the right.
    styles: list[str | None] = []
    for column in range(len(heads)):
        style = "number" if column in numbers else None
        styles.append(style)
    # 1. The row of heads.
    head_cells = []
    for name, style in zip(heads, styles, strict=True):
        cell = tag("th", name, scope="col", class_=style)
        head_cells.append(cell)
    head_row = tag("tr", *head_cells)
    # 2. The other rows.
    body_rows = []
    for row in rows:
        cells = []
        for content, style in zip(row, styles, strict=True):
            cells.append(tag("td", content, class_=style))
        body_rows.append(tag("tr", *cells))
    element = tag(
        "table",
        tag("thead", head_row),
        tag("tbody", *body_rows),
    )
    return tag("div", element, class_="scroll")
