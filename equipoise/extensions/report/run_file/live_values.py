"""Append the values of a run to `live.jsonl`, which holds what `run.json` lacks so far."""

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic

from equipoise.extensions.report.run_file.plain_json import as_json

__all__ = ["LIVE_FILE", "LiveValues"]

LIVE_FILE = "live.jsonl"

_MOST_LINES = 2000
# Seconds between two writings of `run.json`, each of which takes some milliseconds.
_INTERVAL = 2.0
# A link that another user left under the name is not followed, where the system can tell.
_FLAGS = os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)


class LiveValues:
    """Writes values when they are recorded: a line for each, with name, step, value, and seconds since the fit's start.

    Values that loggers receive together are written together, in about 30 microseconds. A file that cannot be written
    is left alone: the run continues without it.

    Args:
        folder: The folder of `run.json`.
        clock: Start of the fit, as `monotonic` counted it.
        write_whole: Writes `run.json`. Called after 2,000 lines, every two seconds at most, so that the file stays
            small.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     live = LiveValues(Path(folder), monotonic(), lambda: None)
        ...     live.add(9, {"loss": 0.5})
        ...     (Path(folder) / "live.jsonl").read_text().split(",")[:3]
        ['["loss"', ' 9', ' 0.5']
    """

    def __init__(self, folder: Path, clock: float, write_whole: Callable[[], None]) -> None:
        self._path = folder / LIVE_FILE
        self._clock = clock
        self._write_whole = write_whole
        self._lines = 0
        self._cleared = 0.0
        self._is_broken = False
        self.clear()

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Append the values of a step."""
        if self._is_broken:
            return
        now = monotonic()
        seconds = round(now - self._clock, 3)
        lines = []
        for name, value in values.items():
            lines.append(f"{json.dumps([name, step, as_json(value), seconds])}\n")
        self._write("".join(lines), os.O_APPEND)
        self._lines += len(lines)
        # Runs that log in each step would do nothing else.
        is_time = now - self._cleared >= _INTERVAL
        if is_time and self._lines >= _MOST_LINES:
            self._write_whole()

    def clear(self) -> None:
        """Forget the values: `run.json` has them."""
        self._lines = 0
        self._cleared = monotonic()
        self._write("", os.O_TRUNC)

    def remove(self) -> None:
        """Remove the file at the end of a fit."""
        self._is_broken = True
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _write(self, text: str, flag: int) -> None:
        # The file is opened anew, so that nothing has to be closed where a run fails.
        try:
            number = os.open(self._path, _FLAGS | flag, 0o666)
            try:
                os.write(number, text.encode())
            finally:
                os.close(number)
        except OSError:
            self._is_broken = True
