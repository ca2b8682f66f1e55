"""Continue the `metrics.csv` of a resumed run after the rows that its checkpoint knows.

Lightning's CSVLogger deletes the file of an earlier run in its folder. A checkpoint therefore notes how many rows each
file had. A run that is resumed into the same folder drops the rows behind these, since it will write them again, and
appends. So every row stands there once, as in a run that was never killed.

A new column needs a new header, with which Lightning's logger writes the file again. Here it is replaced as a whole, so
a process that is killed meanwhile loses no rows.
"""

import csv
import io
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from lightning.pytorch.loggers import CSVLogger

from equipoise.interop.lightning.loggers import continue_csv, csv_writer, set_csv_rewriting
from equipoise.trainer.checkpointing.entry_checks import loading

__all__ = ["continue_files", "keep_rows", "put_aside", "rows_written"]

_FILE = "metrics.csv"


def rows_written(loggers: Iterable[Any]) -> list[dict[str, Any] | None]:
    """How far the file of each CSV logger has come, for a checkpoint; None for any other logger.

    Args:
        loggers: The loggers of the run, in order. What they hold back is written.
    """
    return [_rows_of(logger) for logger in loggers]


def _rows_of(logger: Any) -> dict[str, Any] | None:
    writer = csv_writer(logger)
    if writer is None or "://" in str(writer.metrics_file_path):
        return None
    if writer.metrics:
        logger.save()
    lines = _lines(Path(writer.metrics_file_path))
    return {"rows": max(0, len(lines) - 1), "step": _step_of(lines, len(lines) - 1)}


def _lines(path: Path) -> list[bytes]:
    """The lines of a file, without one that was cut off when a process was killed."""
    if not path.is_file():
        return []
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def _step_of(lines: Sequence[bytes], row: int) -> str | None:
    """The step of a row, counted from 1; None if there is no such row."""
    if not 0 < row < len(lines):
        return None
    header, values = csv.reader([lines[0].decode(), lines[row].decode()])
    return dict(zip(header, values, strict=False)).get("step")


def continue_files(loggers: Sequence[Any], checkpoint: dict[str, Any]) -> None:
    """Lets CSV loggers append to the files of the run that is resumed, where these lie in their folders.

    A file that does not belong to the checkpoint is put aside.

    Args:
        loggers: The loggers of this run, of which none has begun.
        checkpoint: The checkpoint, which holds what `rows_written` returned, if it is one of ours.

    Raises:
        CheckpointError: If that is damaged.
    """
    with loading("equipoise"):
        _continue_files(loggers, checkpoint.get("equipoise", {}).get("rows", []))


def _continue_files(loggers: Sequence[Any], saved: Sequence[dict[str, Any] | None]) -> None:
    for index, logger in enumerate(loggers):
        if not isinstance(logger, CSVLogger) or "://" in str(logger.save_dir) or csv_writer(logger) is not None:
            continue
        path = Path(logger.log_dir, _FILE)
        if not path.is_file():
            continue
        known = saved[index] if index < len(saved) else None
        lines = _lines(path)
        if known is None or not lines or _step_of(lines, known["rows"]) != known["step"]:
            put_aside(path)
            continue
        _replace(path, lines[: known["rows"] + 1])
        continue_csv(logger, next(csv.reader([lines[0].decode()])))


def keep_rows(loggers: Iterable[Any]) -> None:
    """Lets CSV loggers replace their files as a whole where a column is new.

    Args:
        loggers: The loggers of the run, which have begun.
    """
    for logger in loggers:
        writer = csv_writer(logger)
        if writer is not None and "://" not in str(writer.metrics_file_path):
            set_csv_rewriting(writer, partial(_rewrite, Path(writer.metrics_file_path)))


def _rewrite(path: Path, columns: Sequence[str]) -> None:
    """Writes the rows of a file with more columns."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=columns)
    writer.writeheader()
    writer.writerows(rows)
    _replace(path, [text.getvalue().encode()])


def _replace(path: Path, lines: Iterable[bytes]) -> None:
    """Writes a file at once or not at all."""
    with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=".part", delete=False) as part:
        try:
            part.writelines(lines)
            part.flush()
            os.fsync(part.fileno())
            os.chmod(part.name, path.stat().st_mode)
            os.replace(part.name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(part.name)
            raise


def put_aside(path: Path) -> None:
    """Renames a file, `metrics.csv` to `metrics_0.csv` or the next number that is free.

    Args:
        path: The file.
    """
    names = (path.with_name(f"{path.stem}_{number}{path.suffix}") for number in count())
    path.rename(next(name for name in names if not name.exists()))
