"""Output of the progress bar: a terminal, a notebook's widget, or plain lines."""

import importlib.util
import logging
import sys
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

__all__ = ["Display"]


class Display:
    """A place to draw: redrawn in place on a terminal or by a notebook's widget, line by line elsewhere.

    Nothing is drawn unless it is told to: there is no thread.

    Args:
        console: Where to.

    Attributes:
        animated: Whether it is redrawn in place.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.animated = _has_widgets() if console.is_jupyter else _has_cursor(console)
        self.ascii_only = console.options.ascii_only or console.legacy_windows
        self._live: Live | None = None
        self._diverted: list[tuple[logging.StreamHandler[Any], Any]] = []

    def show(self, lines: Text) -> None:
        """Draws the lines in place of those before."""
        if self._live is None:
            self._live = Live(console=self.console, auto_refresh=False, vertical_overflow="crop")
            streams = (sys.stdout, sys.stderr)
            self._live.start()
            self._diverted = [(handler, handler.stream) for handler in _log_handlers() if handler.stream in streams]
            for handler, _ in self._diverted:
                handler.setStream(sys.stderr)
        self._live.update(self._encodable(lines), refresh=True)

    def keep(self, lines: Text) -> None:
        """Writes lines that stay, above those that are redrawn."""
        self.console.print(self._encodable(lines), soft_wrap=True)

    def write(self, text: str) -> None:
        """Writes text as it is; where something is redrawn, above it and in whole lines."""
        if self.animated:
            end = "" if text.endswith("\n") else "\n"
            self.console.print(text, end=end, markup=False, highlight=False, emoji=False, soft_wrap=True)
        else:
            encoding = self.console.encoding
            self.console.file.write(text.encode(encoding, "replace").decode(encoding))
            self.console.file.flush()

    def close(self, *, keep: bool) -> None:
        """Gives the terminal back.

        Args:
            keep: Whether what was drawn last stays.
        """
        live, self._live = self._live, None
        if live is not None:
            for handler, stream in self._diverted:
                handler.setStream(stream)
            live.transient = not keep
            live.stop()

    def _encodable(self, lines: Text) -> Text:
        if not self.ascii_only:
            return lines
        encoding, copy = self.console.encoding, lines.copy()
        copy.plain = lines.plain.encode(encoding, "replace").decode(encoding)
        return copy


def _has_cursor(console: Console) -> bool:
    """Return whether a console writes to a terminal whose cursor can be moved.

    Rich's own answer is not enough: FORCE_COLOR, which notebooks and CI systems set, makes it take a file or a pipe for
    a terminal. Colours may be wanted there; a moved cursor leaves its codes in the text.
    """
    is_terminal = getattr(console.file, "isatty", None)
    if is_terminal is None or not is_terminal():
        return False
    return console.is_terminal and console.is_interactive and not console.is_dumb_terminal


def _has_widgets() -> bool:
    """Return whether a notebook can redraw a line; rich does it by a widget."""
    return all(importlib.util.find_spec(package) is not None for package in ("IPython", "ipywidgets"))


def _log_handlers() -> list[logging.StreamHandler[Any]]:
    """Those that may hold a stream from before a display began, and would write into its lines."""
    names = ("", "lightning", "lightning.pytorch", "lightning.fabric", "equipoise")
    handlers = [handler for name in names for handler in logging.getLogger(name).handlers]
    return [handler for handler in handlers if isinstance(handler, logging.StreamHandler)]
