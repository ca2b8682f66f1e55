"""Private names of the loggers of Lightning.

Each name stands here with the reason why nothing public does; a test notices when one of them changes.
"""

import os
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.loggers.utilities import _log_hyperparams

if TYPE_CHECKING:
    from equipoise.trainer.trainer import Trainer

__all__ = ["continue_csv", "csv_writer", "log_hyperparams", "set_csv_rewriting"]


def log_hyperparams(trainer: "Trainer") -> None:
    """Hands hyperparameters and graph to the loggers; the merge of module and data module has no public name."""
    _log_hyperparams(trainer)  # type: ignore[arg-type]


def csv_writer(logger: Any) -> Any:
    """What writes the file of a CSV logger; None if it has not begun, or if the logger is another.

    The public property would make the writer, which deletes the file that is there.
    """
    is_stock = isinstance(logger, CSVLogger) and type(logger).experiment is CSVLogger.experiment
    return logger._experiment if is_stock else None


def continue_csv(logger: CSVLogger, columns: list[str]) -> None:
    """Lets a CSV logger append to the file in its folder; its writer would delete it, and knows no other way.

    Args:
        logger: The logger, which has not begun.
        columns: The columns of the file.
    """
    with TemporaryDirectory() as empty:
        writer = ExperimentWriter(empty)
    writer.log_dir = logger.log_dir
    writer.metrics_file_path = os.path.join(logger.log_dir, writer.NAME_METRICS_FILE)
    writer.metrics_keys = columns
    logger._experiment = writer


def set_csv_rewriting(writer: ExperimentWriter, rewrite: Callable[[list[str]], None]) -> None:
    """Lets the writer of a CSV logger take another function for its file, where columns have been added.

    Args:
        writer: The writer. One of a class of its own is left as it is.
        rewrite: Writes the file with these columns.
    """
    if type(writer) is ExperimentWriter:
        writer._rewrite_with_new_header = rewrite  # type: ignore[assignment]
