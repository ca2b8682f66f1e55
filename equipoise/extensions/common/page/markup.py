"""Elements of HTML and SVG; all text in them is escaped."""

import html
import re
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = [
    "Markup",
    "breakable",
    "cut",
    "figure",
    "hint",
    "join",
    "legend",
    "picture",
    "plain",
    "section",
    "table",
    "tag",
    "word_column",
]

# Width of a character in pixels.
_CHARACTER = 6.3

# Characters of a part of a name that finds room in a line.
_LONG_PART = 18

# Elements without an end tag.
_EMPTY = {"img", "link", "meta", "wbr"}
# Colours of a terminal.
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# Control characters other than tab and line feed, lone surrogates, and code points that are no characters.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def plain(text: object) -> str:
    """Return a text without characters that HTML forbids: control characters, lone surrogates, terminal colours."""
    without_colours = _COLOURS.sub("", str(text).replace("\r\n", "\n"))
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", without_colours)


def cut(text: object, longest: int = 300) -> str:
    """Return a text of at most this number of characters; a longer one ends with "…"."""
    line = str(text)
    if len(line) > longest:
        return f"{line[: longest - 1]}…"
    return line


def breakable(text: str) -> Markup:
    """Return a text that may be divided before parts of paths and names, and after underscores of long parts."""
    parts: list[str] = []
    for part in re.split(r"(?<=[^\W\d])(?=[./]\w)", text):
        if len(part) > _LONG_PART:
            parts += re.split(r"(?<=_)(?=[^_])", part)
        else:
            parts.append(part)
    return Markup(tag("wbr").join(map(join, parts)))


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
            texts.append(html.escape(plain(child)))
    return Markup("".join(texts))


def section(title: str, *content: Markup | None, note: str = "") -> Markup:
    """Return a section with a heading; the note stands beside the title."""
    return tag("section", _heading("h2", title, note), *content)


def figure(title: str, *content: Markup, note: str = "", names: Markup | None = None) -> Markup:
    """Return a figure below its title, a note beside that, and the names of its parts."""
    return tag("figure", tag("figcaption", _heading("h3", breakable(title), note), names), *content, class_="chart")


def picture(title: str, *content: object, **attributes: Any) -> Markup:
    """Return a picture; its title tells those who cannot see it what it shows."""
    return tag("svg", tag("title", title), *content, role="img", **attributes)


def _heading(name: str, title: str, note: str) -> Markup:
    """Return a heading; the note stands beside it, if there is one."""
    note_element = None
    if note:
        note_element = tag("span", note, class_="note")
    return tag(name, title, note_element)


def legend(entries: Iterable[Sequence[object]], *further: Markup) -> Markup:
    """Return the legend of a figure.

    Args:
        entries: For each part its CSS class, by which the style sheet colours its key, then its label and more content.
        further: Items without a key.
    """
    items = [tag("li", tag("i", class_=f"key {style}"), *content) for style, *content in entries]
    return tag("ul", *items, *further, class_="legend")


def word_column(words: Sequence[tuple[str, float]], height: int) -> Markup:
    """Draw words beside a figure, each with its baseline in pixels: a column as wide as the longest of them."""
    width = 10 + round(_CHARACTER * max((len(word) for word, _ in words), default=0))
    texts = []
    for word, baseline in words:
        # Words end 8 pixels before the figure.
        texts.append(tag("text", word, x=width - 8, y=f"{baseline:.1f}", text_anchor="end"))
    return tag("svg", *texts, class_="labels", width=width, height=height, aria_hidden="true")


def hint(*content: object) -> Markup:
    """Return a paragraph for the place of missing data, such as how to get it."""
    return tag("p", *content, class_="hint")


def table(
    heads: Sequence[str], rows: Sequence[Sequence[object]], numbers: Sequence[int] = (), *, row_heads: bool = False
) -> Markup:
    """Return a table that scrolls where it is too wide.

    Args:
        heads: The heads of the columns.
        rows: The cells of each row.
        numbers: Indices of the columns that hold numbers. Default: none.
        row_heads: Whether the first cell of each row is its head. The first head may be empty then. Default: False.
    """
    # The style sheet aligns columns of numbers to the right.
    styles = ["number" if column in numbers else None for column in range(len(heads))]
    head_cells = []
    for name, style in zip(heads, styles, strict=True):
        head_cells.append(tag("th", name, scope="col", class_=style) if name else tag("td"))
    body_rows = []
    for row in rows:
        cells: list[Markup] = []
        for content, style in zip(row, styles, strict=True):
            if row_heads and not cells:
                cells.append(tag("th", content, scope="row"))
            else:
                cells.append(tag("td", content, class_=style))
        body_rows.append(tag("tr", *cells))
    head = tag("thead", tag("tr", *head_cells))
    return tag("div", tag("table", head, tag("tbody", *body_rows)), class_="scroll")
