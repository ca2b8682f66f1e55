"""Tables of which nothing is cut: wide in a pipe, in blocks of columns on a narrow terminal."""

from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table

__all__ = ["WholeTable", "print_table"]

# Characters between two columns; the ends of a table need one more.
_BETWEEN = 3
# Characters to which a column of words may be wrapped.
_WORDS = 20
# Wider than any table.
_UNLIMITED = 100_000


class WholeTable:
    """A table that is drawn without a cut cell, to be printed with `crop=False`.

    In a pipe it is as wide as its content. On a terminal that is too narrow, columns of words, with `overflow="fold"`,
    are wrapped. If this is not enough, the columns follow in several blocks, each of which repeats the first columns.

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
        has_limit = console.is_terminal or console.is_jupyter
        if natural <= options.max_width or not has_limit:
            yield from console.render(self._table, options.update(width=natural))
            return
        for block in self._blocks(console, unlimited, options.max_width):
            narrowest = Measurement.get(console, unlimited, block).minimum
            # A terminal breaks a line that is too long for it, and cuts nothing.
            yield from console.render(block, options.update(width=max(narrowest, options.max_width)))

    def _blocks(self, console: Console, unlimited: ConsoleOptions, limit: int) -> Iterator[Table]:
        """Yield tables of some of the columns, each of them within the limit, if that is possible."""
        widths = [_narrowest(console, unlimited, column) for column in self._table.columns]
        first = list(range(self._repeated))
        block = list(first)
        for index in range(self._repeated, len(widths)):
            width = sum(widths[column] + _BETWEEN for column in [*block, index]) + 1
            if width > limit and len(block) > len(first):
                yield self._part(block, widths, is_last=False)
                block = list(first)
            block.append(index)
        yield self._part(block, widths, is_last=True)

    def _part(self, indices: Sequence[int], widths: Sequence[int], *, is_last: bool) -> Table:
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
            # A column of words takes the room that others leave.
            width = None
            if column.overflow != "fold":
                width = widths[index]
            part.add_column(
                column.header,
                justify=column.justify,
                style=column.style,
                width=width,
                no_wrap=column.no_wrap,
                overflow="fold",
            )
        cells = [list(table.columns[index].cells) for index in indices]
        for row, texts in zip(table.rows, zip(*cells, strict=True), strict=True):
            part.add_row(*texts, end_section=row.end_section)
        return part


def _narrowest(console: Console, unlimited: ConsoleOptions, column: Column) -> int:
    """Return the characters that a column needs. Heads are broken between words."""
    head = Measurement.get(console, unlimited, column.header)
    widths = [head.minimum]
    if column.no_wrap:
        widths = [head.maximum]
    widths += [Measurement.get(console, unlimited, cell).maximum for cell in column.cells]
    widest = max(widths)
    if column.overflow == "fold":
        return min(widest, _WORDS)
    return widest


def print_table(table: Table, console: Console | None = None, *, repeated: int = 1) -> None:
    """Print a table of which nothing is cut.

    Args:
        table: The table. Columns with `overflow="fold"` may be wrapped, others may not.
        console: The console to print to. Default: None, the output.
        repeated: Number of first columns that are repeated, if the columns follow in blocks. Default: 1.
    """
    console = console or Console()
    console.print(WholeTable(table, repeated), crop=False)
