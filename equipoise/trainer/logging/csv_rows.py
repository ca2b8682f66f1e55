"""Continue the `metrics.csv` of a resumed run after the rows that its checkpoint knows.

Lightning's CSVLogger deletes the file of an earlier run in its folder. A checkpoint therefore notes how many rows each
file had. A run that is resumed into the same folder drops the rows after these, since it will write them again, and
appends. So every row stands there once, as in a run that was never killed.

A new column needs a new header, with which Lightning's logger writes the file again. Here it is replaced as a whole, so
a process that is killed meanwhile loses no rows.
"""

import csv
import io
import locale
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import count, zip_longest
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger

from equipoise.interop.lightning.loggers import csv_writer, set_csv_rewriting, start_csv
from equipoise.interop.remote.paths import AnyPath, to_path
from equipoise.parallel.shards.atomic_file import write_atomically

__all__ = ["continue_files", "keep_rows", "put_aside", "rows_written"]

# Name of the file of a CSV logger.
_FILE = "metrics.csv"
# Lightning's logger writes in the default encoding, which is not UTF-8 on every system.
_ENCODING = "utf-8" if sys.flags.utf8_mode else locale.getencoding()


def rows_written(loggers: Iterable[Any]) -> list[dict[str, Any] | None]:
    """Return the number of rows in the file of each CSV logger, for a checkpoint; None for any other logger.

    Args:
        loggers: The loggers of the run, in order. Rows that they hold in memory are written.
    """
    return [_rows_of(logger) for logger in loggers]


def _rows_of(logger: Any) -> dict[str, Any] | None:
    writer = csv_writer(logger)
    if writer is None:
        return None

    # Write the rows that the logger holds in memory, and read all of them.
    if writer.metrics:
        logger.save()
    lines = _complete_lines(to_path(writer.metrics_file_path))
    # The first line is the header; an empty file has not even that.
    number_of_rows = max(0, len(lines) - 1)
    return {"rows": number_of_rows, "step": _step_of(lines, number_of_rows)}


def _complete_lines(path: AnyPath) -> list[bytes]:
    """Return the lines of a file, without one that was cut off when a process was killed."""
    if not path.is_file():
        return []
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def _step_of(lines: Sequence[bytes], row: int) -> str | None:
    """Return the step of a row, counted from 1; None if there is no such row."""
    if not 0 < row < len(lines):
        return None
    header = lines[0].decode(_ENCODING)
    names, values = csv.reader([header, lines[row].decode(_ENCODING)])
    return dict(zip(names, values, strict=False)).get("step")


def continue_files(loggers: Sequence[Any], checkpoint: dict[str, Any]) -> None:
    """Let CSV loggers append to the files of the run that is resumed, if these lie in their folders.

    A file that does not belong to the checkpoint is put aside.

    Args:
        loggers: The loggers of this run, of which none has begun.
        checkpoint: The checkpoint, which contains the result of `rows_written` if it is one of ours.

    Raises:
        CheckpointError: If that entry is damaged.
    """
    from equipoise.trainer.checkpointing.entry_checks import loading

    with loading("equipoise"):
        saved = checkpoint.get("equipoise", {}).get("rows", [])
        # A run may have more loggers than the one before it.
        for logger, rows in zip_longest(loggers, saved[: len(loggers)]):
            _continue_file(logger, rows)


def _continue_file(logger: Any, saved: dict[str, Any] | None) -> None:
    """Let one logger append to its file, of which the checkpoint has the number of rows and the last step, or nothing.

    The logger would delete the file when it begins.
    """
    if not isinstance(logger, CSVLogger) or csv_writer(logger) is not None:
        return
    path = to_path(logger.log_dir) / _FILE
    if not path.is_file():
        return

    # 1. Check that its rows are those of the checkpoint.
    lines = _complete_lines(path)
    if saved is None or not lines or _step_of(lines, saved["rows"]) != saved["step"]:
        put_aside(path)
        return

    # 2. Drop the rows after them, which this run will write again, and append.
    _replace(path, b"".join(lines[: saved["rows"] + 1]))
    columns = next(csv.reader([lines[0].decode(_ENCODING)]))
    hidden = put_aside(path)
    try:
        start_csv(logger, columns)
    finally:
        hidden.rename(path)


def keep_rows(loggers: Iterable[Any]) -> None:
    """Let CSV loggers replace their files as a whole when a column is new.

    Args:
        loggers: The loggers of the run, which have begun.
    """
    for logger in loggers:
        start_csv(logger)
        writer = csv_writer(logger)
        if writer is None:
            continue
        set_csv_rewriting(writer, partial(_rewrite, to_path(writer.metrics_file_path)))


def _rewrite(path: AnyPath, columns: Sequence[str]) -> None:
    """Write the rows of a file again, with more columns."""
    with path.open("r", encoding=_ENCODING, newline="") as file:
        rows = list(csv.DictReader(file))
    # Rows of before have empty cells in the new columns.
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=columns)
    writer.writeheader()
    writer.writerows(rows)
    _replace(path, text.getvalue().encode(_ENCODING))


def _replace(path: AnyPath, content: bytes) -> None:
    """Write a file completely or not at all; writers of other file systems do so by themselves."""
    if isinstance(path, Path):
        write_atomically(path, lambda file: file.write(content))
    else:
        path.write_bytes(content)


def put_aside(path: AnyPath) -> AnyPath:
    """Rename a file, `metrics.csv` to `metrics_0.csv` or the next number that is free.

    Args:
        path: The file.

    Returns:
        Its new path.
    """
    paths = (path.with_name(f"{path.stem}_{number}{path.suffix}") for number in count())
    free = next(path for path in paths if not path.exists())
    path.rename(free)
    return free
