"""Append the values of a run to `live.jsonl`, which holds what `run.json` lacks so far."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from time import monotonic

from equipoise.extensions.report.run_file.plain_json import as_json

__all__ = ["LIVE_FILE", "LiveValues"]

LIVE_FILE = "live.jsonl"

_MOST_LINES = 1000


class LiveValues:
    """Writes each value when it is recorded: a line with name, step, value, and seconds since the start of the fit.

    A line costs some microseconds, and is written as often as loggers receive values. A file that cannot be written is
    left alone: the run goes on without it.

    Args:
        folder: The folder of `run.json`.
        clock: Start of the fit, as `monotonic` counted it.
        write_whole: Writes `run.json`. Called after 1,000 lines, so that the file stays small.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     live = LiveValues(Path(folder), monotonic(), lambda: None)
        ...     live.add("loss", 9, 0.5)
        ...     (Path(folder) / "live.jsonl").read_text().split(",")[:3]
        ['["loss"', ' 9', ' 0.5']
    """

    def __init__(self, folder: Path, clock: float, write_whole: Callable[[], None]) -> None:
        self._path = folder / LIVE_FILE
        self._clock = clock
        self._write_whole = write_whole
        self._lines = 0
        self._is_broken = False
        self.clear()

    def add(self, name: str, step: int, value: float) -> None:
        """Append a value."""
        if self._is_broken:
            return
        seconds = round(monotonic() - self._clock, 3)
        number = as_json(value)
        line = json.dumps([name, step, number, seconds])
        # The file is opened anew, so that nothing has to be closed where a run fails.
        try:
            with self._path.open("ab", buffering=0) as file:
                file.write(f"{line}\n".encode())
        except OSError:
            self._is_broken = True
            return
        self._lines += 1
        if self._lines >= _MOST_LINES:
            self._write_whole()

    def clear(self) -> None:
        """Forget the values: `run.json` has them."""
        self._lines = 0
        try:
            self._path.write_bytes(b"")
        except OSError:
            self._is_broken = True

    def remove(self) -> None:
        """Remove the file at the end of a fit."""
        self._is_broken = True
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
