"""Tables and texts of which nothing is cut: within the width of a terminal, or of a line in a file."""

import re
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from equipoise.tables.width import FILE_WIDTH

__all__ = ["WholeTable", "print_table", "print_text"]

# Characters between two columns; the ends of a table need one more.
_BETWEEN = 3
# Characters to which a column of words may be wrapped.
_WORDS = 20
# A longer word of such a column, as a path is, is broken.
_LONGEST_WORD = 40
# Wider than any table.
_UNLIMITED = 100_000


class WholeTable:
    """A table that is drawn without a cut cell, to be printed with `crop=False`.

    Where the terminal, or a line of a file, is too narrow, columns of words, with `overflow="fold"`, are wrapped. If
    this is not enough, the columns follow in several blocks, each of which repeats the first columns.

    Args:
        table: The table.
        repeated: Number of first columns that each block repeats. Default: 1.
    """

    def __init__(self, table: Table, repeated: int = 1) -> None:
        self._table = table
        self._repeated = repeated

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table, or its blocks."""
        unlimited = options.update(max_width=_UNLIMITED)
        natural = Measurement.get(console, unlimited, self._table).maximum
        limit = _line_width(console)
        if natural <= limit:
            yield from console.render(self._table, options.update(width=natural))
            return
        for block, narrowest in self._blocks(console, unlimited, limit):
            # A terminal breaks a line that is too long for it, and cuts nothing.
            yield from console.render(block, options.update(width=max(narrowest, limit)))

    def fitting(self, console: Console) -> tuple[Table, list[str]]:
        """Return a table of the columns that find room, and the heads of the others.

        Args:
            console: The console that will show it.
        """
        unlimited = console.options.update(max_width=_UNLIMITED)
        limit = _line_width(console)
        if Measurement.get(console, unlimited, self._table).maximum <= limit:
            return self._table, []
        block, _ = next(self._blocks(console, unlimited, limit))
        shown = len(block.columns)
        heads = [str(column.header) for column in self._table.columns]
        return self._part(range(shown), {}, is_last=True), heads[shown:]

    def _blocks(self, console: Console, unlimited: ConsoleOptions, limit: int) -> Iterator[tuple[Table, int]]:
        """Yield tables of some of the columns, each of them within the limit, if that is possible, and their widths."""
        widths = [_widths_of(console, unlimited, column) for column in self._table.columns]
        least = [narrow for narrow, _ in widths]
        first = list(range(self._repeated))
        block = list(first)
        for index in range(self._repeated, len(widths)):
            if _sum(least, [*block, index]) > limit and len(block) > len(first):
                yield self._part(block, _with_room(widths, block, limit), is_last=False), _sum(least, block)
                block = list(first)
            block.append(index)
        yield self._part(block, _with_room(widths, block, limit), is_last=True), _sum(least, block)

    def _part(self, indices: Sequence[int], widths: Mapping[int, int], *, is_last: bool) -> Table:
        """Return a table of some of the columns. The title stands above the first, the caption below the last."""
        table = self._table
        is_first = len(indices) <= self._repeated or indices[self._repeated] == self._repeated
        title = None
        if is_first:
            title = table.title
        caption = None
        if is_last:
            caption = table.caption
        part = Table(
            title=title,
            caption=caption,
            box=table.box,
            header_style=table.header_style,
            pad_edge=table.pad_edge,
            collapse_padding=table.collapse_padding,
            title_justify=table.title_justify,
            caption_justify=table.caption_justify,
        )
        for index in indices:
            column = table.columns[index]
            part.add_column(
                column.header,
                justify=column.justify,
                style=column.style,
                width=widths.get(index),
                no_wrap=column.no_wrap,
                overflow=column.overflow,
            )
        cells = [list(table.columns[index].cells) for index in indices]
        for row, texts in zip(table.rows, zip(*cells, strict=True), strict=True):
            part.add_row(*texts, end_section=row.end_section)
        return part


def _sum(widths: Sequence[int], columns: Sequence[int]) -> int:
    """Return the width of a table of some columns."""
    return sum(widths[column] + _BETWEEN for column in columns) + 1


def _with_room(widths: Sequence[tuple[int, int]], columns: Sequence[int], limit: int) -> dict[int, int]:
    """Return the widths of columns: the least ones, and the room that is left, for the first that can use it."""
    chosen = {column: widths[column][0] for column in columns}
    room = limit - _sum([narrow for narrow, _ in widths], columns)
    for column in columns:
        more = max(0, min(room, widths[column][1] - chosen[column]))
        chosen[column] += more
        room -= more
    return chosen


def _widths_of(console: Console, unlimited: ConsoleOptions, column: Column) -> tuple[int, int]:
    """Return the characters that a column needs, with heads broken between words, and those that it can use."""
    head = Measurement.get(console, unlimited, column.header)
    widths = [head.minimum]
    if column.no_wrap:
        widths = [head.maximum]
    widths += [Measurement.get(console, unlimited, cell).maximum for cell in column.cells]
    widest = max(widths)
    natural = max(widest, head.maximum)
    if column.overflow != "fold":
        return widest, natural
    words = [Measurement.get(console, unlimited, cell).minimum for cell in column.cells]
    return min(widest, max([head.minimum, _WORDS, *(min(word, _LONGEST_WORD) for word in words)])), natural


def _line_width(console: Console) -> int:
    if console.is_terminal or console.is_jupyter:
        return console.width
    return FILE_WIDTH


def print_text(text: str | Text, console: Console | None = None) -> None:
    """Print a text in lines that end between words. A word that is too long, such as a path, stays whole.

    Args:
        text: The text.
        console: The console to print to. Default: None, the output.
    """
    console = console or Console()
    text = Text(text) if isinstance(text, str) else text
    for line in text.split("\n", allow_blank=True):
        for part in line.divide(_ends_of_lines(line.plain, _line_width(console))):
            part.rstrip()
            console.print(part, soft_wrap=True, highlight=False)


def _ends_of_lines(text: str, width: int) -> list[int]:
    """Return the places, before words, at which a text is divided into lines."""
    ends: list[int] = []
    start = 0
    for word in re.finditer(r"\S+", text):
        if word.end() - start > width and text[start : word.start()].strip():
            start = word.start()
            ends.append(start)
    return ends


def print_table(table: Table, console: Console | None = None, *, repeated: int = 1, leaves_out: bool = False) -> None:
    """Print a table of which nothing is cut.

    Args:
        table: The table. Columns with `overflow="fold"` may be wrapped, others may not.
        console: The console to print to. Default: None, the output.
        repeated: Number of first columns that are repeated, if the columns follow in blocks. Default: 1.
        leaves_out: Leave out the last columns that find no room, and name them below, instead of blocks. Default:
            False.
    """
    console = console or Console()
    left_out: list[str] = []
    if leaves_out:
        table, left_out = WholeTable(table, repeated).fitting(console)
    console.print(WholeTable(table, repeated), crop=False)
    if left_out:
        print_text(f"Without room for: {', '.join(left_out)}.", console)
