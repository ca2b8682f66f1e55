"""Private names of the loggers of Lightning.

Each name stands here with the reason why nothing public does; a test notices when one of them changes.
"""

import os
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.loggers.utilities import _log_hyperparams

__all__ = ["continue_csv", "csv_writer", "log_hyperparams", "set_csv_rewriting"]


def log_hyperparams(trainer: Any) -> None:
    """Pass hyperparameters and graph to the loggers; the merge of module and data module has no public name."""
    _log_hyperparams(trainer)


def csv_writer(logger: Any) -> Any:
    """Return the writer of a CSV logger; None if the logger has no writer yet, or is of another class.

    The public property would create the writer, which deletes an existing file.
    """
    if not isinstance(logger, CSVLogger):
        return None
    if type(logger).experiment is not CSVLogger.experiment:
        return None
    return logger._experiment


def continue_csv(logger: CSVLogger, columns: list[str]) -> None:
    """Let a CSV logger append to the file in its folder. A new writer would delete the file.

    Args:
        logger: The logger, which has no writer yet.
        columns: The columns of the file.
    """
    # The constructor deletes files of an earlier run, so it gets an empty folder.
    with TemporaryDirectory() as empty:
        writer = ExperimentWriter(empty)
    writer.log_dir = logger.log_dir
    writer.metrics_file_path = os.path.join(logger.log_dir, writer.NAME_METRICS_FILE)
    writer.metrics_keys = columns
    logger._experiment = writer


def set_csv_rewriting(writer: ExperimentWriter, rewrite: Callable[[list[str]], None]) -> None:
    """Replace the function by which the writer of a CSV logger adds columns to its file.

    Args:
        writer: The writer. A writer of a derived class stays as it is.
        rewrite: Writes the file with the columns that it receives.
    """
    if type(writer) is ExperimentWriter:
        writer._rewrite_with_new_header = rewrite  # type: ignore[assignment]
