"""Private names of the loggers of Lightning.

Each name has a comment with the reason why no public one suffices, and with the way of versions without it.
"""

import warnings
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from torch import Tensor

__all__ = ["csv_writer", "has_csv", "log_hyperparams", "set_csv_rewriting", "start_csv"]

# Writers of the loggers that have begun here.
_writers: WeakKeyDictionary[CSVLogger, ExperimentWriter] = WeakKeyDictionary()


def log_hyperparams(trainer: Any) -> None:
    """Pass the graph of the module, and the hyperparameters of module and data module, to the loggers.

    Args:
        trainer: The trainer.

    Raises:
        RuntimeError: If both have a hyperparameter of one name with different values, as in Lightning.
    """
    if not trainer.loggers:
        return
    merged: dict[str, Any] | None = None
    for owner in (trainer.lightning_module, trainer.datamodule):
        if owner is None or not _logs_hyperparams(owner):
            continue
        # "_class_path" is a note of LightningCLI.
        own = {name: value for name, value in owner.hparams_initial.items() if name != "_class_path"}
        merged = merged or {}
        differing = [name for name in merged.keys() & own.keys() if _differ(merged[name], own[name])]
        if differing:
            raise RuntimeError(
                f"Module and data module both have the hyperparameters {sorted(differing)}, with different values. Give"
                " them equal values or other names, or save those of one with `save_hyperparameters(logger=False)`."
            )
        merged |= own
    for logger in trainer.loggers:
        if merged is not None:
            logger.log_hyperparams(merged)
        logger.log_graph(trainer.lightning_module)
        logger.save()


def _logs_hyperparams(owner: Any) -> bool:
    """Return True if `save_hyperparameters` was called, without logger=False if Lightning tells."""
    logs = getattr(owner, "_log_hyperparams", None)
    # This copies all of them.
    return bool(owner.hparams_initial if logs is None else logs)


def _differ(first: Any, second: Any) -> bool:
    if type(first) is not type(second):
        return True
    if isinstance(first, Tensor):
        return first is not second
    return bool(first != second)


def has_csv(loggers: Iterable[Any]) -> bool:
    """Return True if a CSV logger is among the loggers."""
    return any(isinstance(logger, CSVLogger) for logger in loggers)


def csv_writer(logger: Any) -> Any:
    """Return the writer of a CSV logger; None if the logger has no writer yet, or is of another class.

    The public property would create the writer, which deletes an existing file. Without the private name, only writers
    that `start_csv` has started are known.
    """
    if not _is_csv(logger):
        return None
    return getattr(logger, "_experiment", _writers.get(logger))


def _is_csv(logger: Any) -> bool:
    return isinstance(logger, CSVLogger) and type(logger).experiment is CSVLogger.experiment


def start_csv(logger: Any, columns: list[str] | None = None) -> None:
    """Let a CSV logger begin. It deletes the file of an earlier run in its folder.

    Args:
        logger: The logger. Nothing is done for one of another class.
        columns: The columns of a file that the caller puts back afterwards. Default: None, there is none.
    """
    if not _is_csv(logger):
        return
    with warnings.catch_warnings():
        if columns is not None:
            # It says that files are deleted.
            warnings.filterwarnings("ignore", message="Experiment logs directory")
        writer = logger.experiment
    # Processes other than the main one have none.
    if not isinstance(writer, ExperimentWriter):
        return
    _writers[logger] = writer
    if columns is not None:
        writer.metrics_keys = columns


def set_csv_rewriting(writer: ExperimentWriter, rewrite: Callable[[list[str]], None]) -> None:
    """Replace the function by which the writer of a CSV logger adds columns to its file.

    Args:
        writer: The writer. A writer of a derived class stays as it is.
        rewrite: Writes the file with the columns that it receives.
    """
    if type(writer) is ExperimentWriter:
        writer._rewrite_with_new_header = rewrite  # type: ignore[assignment]
