"""Width of the output: that of the terminal, and a fixed one in a pipe or a file."""

import os
import sys
import textwrap
from collections.abc import Mapping
from typing import TextIO

__all__ = ["FILE_WIDTH", "entries", "on_terminal", "output_width", "wrapped"]

# Characters of a line where no screen sets its width.
FILE_WIDTH = 120
# Where the terminal does not know its own.
_USUAL_WIDTH = 80
# Widest first part of a line that has its meaning beside it.
_MOST_BESIDE = 28
# Below this, lines run over the edge of the screen rather than hold a word each.
_LEAST_WIDTH = 40


def output_width(stream: TextIO | None = None) -> int:
    """Return the characters of a line.

    Args:
        stream: Where the line is written. Default: None, the output.
    """
    stream = stream or sys.stdout
    if not stream.isatty():
        return FILE_WIDTH
    try:
        columns = int(os.environ.get("COLUMNS", "0")) or os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    return max(columns or _USUAL_WIDTH, _LEAST_WIDTH)


def wrapped(text: str, width: int, indent: str = "", subsequent: str | None = None) -> str:
    """Return a text in lines that end between words; a word that is too long, such as a path, stays whole.

    Args:
        text: The text; its own line breaks stay.
        width: The characters of a line.
        indent: What the first line begins with. Default: nothing.
        subsequent: What the other lines begin with. Default: None, as the first.

    Example:
        >>> print(wrapped("a line of words", 8, "- ", "  "))
        - a line
          of
          words
    """
    lines: list[str] = []
    for line in text.split("\n"):
        # A line of the text that is indented stays so where it is continued.
        own = line[: len(line) - len(line.lstrip())]
        rest = (indent if subsequent is None else subsequent) + own
        start = rest if lines else indent + own
        lines += textwrap.wrap(
            line.lstrip(),
            width,
            initial_indent=start,
            subsequent_indent=rest,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]
    return "\n".join(lines)


def on_terminal(message: str) -> str:
    """Return a message for the error output: in lines of words on a terminal, unchanged in a file, for searches.

    Args:
        message: The message.
    """
    if not sys.stderr.isatty():
        return message
    return wrapped(message, output_width(sys.stderr))


def entries(meanings: Mapping[str, str]) -> str:
    """Return lines with names and their meanings, which are wrapped beside the names.

    Args:
        meanings: The meaning of each name.
    """
    beside = [len(name) for name in meanings if len(name) <= _MOST_BESIDE]
    column = max(beside, default=0) + 4
    width = output_width()
    lines = []
    for name, meaning in meanings.items():
        if len(name) <= _MOST_BESIDE:
            lines.append(wrapped(meaning, width, f"  {name:{column - 2}}", " " * column).rstrip())
        else:
            lines += [f"  {name}", wrapped(meaning, width, " " * column)]
    return "\n".join(lines)
