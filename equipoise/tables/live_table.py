"""A table on a terminal that is redrawn while something runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table

__all__ = ["LiveTable"]


class LiveTable:
    """Redraws a table during a block, and removes it at the end, as a closing one follows.

    Args:
        table: Function that returns the table as it is now.
        console: The console to draw on.
        is_shown: True draws the table, on a terminal only. False draws nothing.

    Attributes:
        is_shown: True if it is drawn.
    """

    def __init__(self, table: Callable[[], Table], console: Console, *, is_shown: bool) -> None:
        self.is_shown = console.is_terminal and is_shown
        self._table = table
        self._console = console

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Draw the table during a block."""
        if not self.is_shown:
            yield
            return
        with Live(get_renderable=self._table, console=self._console, refresh_per_second=4, transient=True):
            yield
