"""Output of the progress bar: a terminal, a notebook's widget, or plain lines."""

import importlib.util
import logging
import sys
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

__all__ = ["Display"]

_StreamHandler = logging.StreamHandler[Any]


class Display:
    """Draw lines in place on a terminal or in a notebook's widget, and write them line by line elsewhere.

    It draws only when a method is called, and has no thread.

    Attributes:
        animated: True if lines are redrawn in place.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        if console.is_jupyter:
            self.animated = _has_widgets()
        else:
            self.animated = _has_cursor(console)
        self.ascii_only = console.options.ascii_only or console.legacy_windows
        self._live: Live | None = None
        # Handlers of logs whose stream is replaced, and their former streams.
        self._diverted: list[tuple[_StreamHandler, Any]] = []

    def show(self, lines: Text) -> None:
        """Draw lines in place of the former ones."""
        if self._live is None:
            self._live = Live(console=self.console, auto_refresh=False, vertical_overflow="crop")
            streams = (sys.stdout, sys.stderr)
            # This replaces `sys.stdout` and `sys.stderr`.
            self._live.start()
            self._divert_logs(streams)
        self._live.update(self._encodable(lines), refresh=True)

    def _divert_logs(self, streams: tuple[Any, Any]) -> None:
        """Let handlers that write to one of the streams write above the redrawn lines."""
        self._diverted = [(handler, handler.stream) for handler in _log_handlers() if handler.stream in streams]
        for handler, _ in self._diverted:
            handler.setStream(sys.stderr)

    def write_lines(self, lines: Text) -> None:
        """Write lines that stay, above those that are redrawn."""
        self.console.print(self._encodable(lines), soft_wrap=True)

    def write(self, text: str) -> None:
        """Write text without changes; on an animated display above the redrawn lines, in whole lines."""
        if self.animated:
            end = "" if text.endswith("\n") else "\n"
            self.console.print(text, end=end, markup=False, highlight=False, emoji=False, soft_wrap=True)
        else:
            self.console.file.write(self._encoded(text))
            self.console.file.flush()

    def close(self, *, keep: bool) -> None:
        """Stop drawing, and restore the streams.

        Args:
            keep: Leave the last lines on the terminal.
        """
        live = self._live
        self._live = None
        if live is None:
            return
        for handler, stream in self._diverted:
            handler.setStream(stream)
        live.transient = not keep
        live.stop()

    def _encodable(self, lines: Text) -> Text:
        if not self.ascii_only:
            return lines
        copy = lines.copy()
        copy.plain = self._encoded(lines.plain)
        return copy

    def _encoded(self, text: str) -> str:
        """Replace characters that the console cannot write."""
        encoding = self.console.encoding
        return text.encode(encoding, "replace").decode(encoding)


def _has_cursor(console: Console) -> bool:
    """Return True if a console writes to a terminal whose cursor can be moved.

    Rich's own check is not enough: with FORCE_COLOR, which notebooks and CI systems set, rich takes a file or a pipe
    for a terminal. Colours may be useful there, but codes that move the cursor would stay in the text.
    """
    is_terminal = getattr(console.file, "isatty", None)
    if is_terminal is None or not is_terminal():
        return False
    return console.is_terminal and console.is_interactive and not console.is_dumb_terminal


def _has_widgets() -> bool:
    """Return True if a notebook can redraw a line, for which rich needs a widget."""
    return all(importlib.util.find_spec(package) is not None for package in ("IPython", "ipywidgets"))


def _log_handlers() -> list[_StreamHandler]:
    """Return handlers that may hold a stream from before the display, and would write into its lines."""
    names = ("", "lightning", "lightning.pytorch", "lightning.fabric", "equipoise")
    handlers = [handler for name in names for handler in logging.getLogger(name).handlers]
    return [handler for handler in handlers if isinstance(handler, logging.StreamHandler)]
