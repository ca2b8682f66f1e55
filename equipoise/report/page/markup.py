"""Elements of HTML and SVG; all text in them is escaped."""

import html
import re
from typing import Any

__all__ = ["Markup", "join", "plain", "tag"]

_EMPTY = {"meta", "br"}
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # colours for a terminal
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def plain(text: object) -> str:
    """A text without what no document may hold: control characters, halves of characters, colours of a terminal."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", _ESCAPES.sub("", str(text).replace("\r\n", "\n")))


def tag(name: str, /, *content: object, **attributes: Any) -> Markup:
    """An element.

    Args:
        name: Its name.
        content: What stands in it: `Markup` as it is, None not at all, anything else as text, escaped.
        attributes: Its attributes; `class_` is "class", other underscores are hyphens, None leaves an attribute out.

    Example:
        >>> tag("p", "a < b", tag("b", "!"), class_="x", data_y=1)
        '<p class="x" data-y="1">a &lt; b<b>!</b></p>'
    """
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    start = "".join(f' {key}="{html.escape(plain(value))}"' for key, value in given.items())
    if name in _EMPTY:
        return Markup(f"<{name}{start}>")
    return Markup(f"<{name}{start}>{join(*content)}</{name}>")


def join(*content: object) -> Markup:
    """Pieces one after another; text among them is escaped."""
    kept = (piece for piece in content if piece is not None)
    return Markup("".join(piece if isinstance(piece, Markup) else html.escape(plain(piece)) for piece in kept))
