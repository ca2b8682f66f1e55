"""Loggers from the argument `logger`: TensorBoard or CSV by default, Lightning's, or objects with their methods."""

import os
from collections.abc import Iterable
from functools import cache
from typing import Any

from lightning.pytorch.loggers import CometLogger, CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from equipoise.errors import ConfigurationError
from equipoise.interop.lightning.classes import is_a
from equipoise.interop.remote.paths import is_remote, to_path

__all__ = ["select_loggers"]

# Their packages make a local folder of a URL.
_LOCAL_LOGGERS = (CometLogger, MLFlowLogger, WandbLogger)

_CLASSES = {
    "comet": CometLogger,
    "mlflow": MLFlowLogger,
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
}
_LOGGER_METHODS = ("log_metrics", "log_hyperparams", "save", "finalize")
_LOGGER_ATTRIBUTES = ("save_dir", "name", "version")


def select_loggers(logger: bool | Logger | Iterable[Logger] | None, root_dir: str, *, dummy: bool) -> list[Logger]:
    """Return the loggers.

    Args:
        logger: A logger, several, True for the default (TensorBoard, or CSV if TensorBoard is not installed), or False
            for none.
        root_dir: The folder in which the default logger writes.
        dummy: Whether loggers write nothing, as under `fast_dev_run`.

    Raises:
        ConfigurationError: If one of them is no logger.
    """
    # False, None, or an empty list.
    if not logger:
        return []
    if dummy:
        return [DummyLogger()]
    if logger is True:
        return [_default_logger(root_dir)]
    loggers: list[Any] = [logger]
    is_single = isinstance(logger, str) or _looks_like_a_logger(logger)
    if isinstance(logger, Iterable) and not is_single:
        loggers = list(logger)
    for item in loggers:
        if not _looks_like_a_logger(item):
            example = _CLASSES.get(str(item).lower(), CSVLogger).__name__
            raise ConfigurationError(
                "logger must be True, False, or one or several of Lightning's loggers, such as"
                f" {example}('logs'), or objects with their methods ({', '.join(_LOGGER_METHODS)}), not {item!r}."
            )
        _check_attributes(item)
    return loggers


def _check_attributes(logger: Any) -> None:
    missing = [name for name in _LOGGER_ATTRIBUTES if not hasattr(logger, name)]
    if missing:
        raise ConfigurationError(
            f"The logger {type(logger).__name__} has no {', '.join(missing)}, which name the folder of checkpoints:"
            " derive it from lightning.pytorch.loggers.Logger, or give it these attributes (save_dir may be None)."
        )
    folder = logger.save_dir
    if not isinstance(folder, str | os.PathLike):
        return
    if is_remote(to_path(folder)) and is_a(logger, *_LOCAL_LOGGERS):
        raise ConfigurationError(
            f"{type(logger).__name__} writes to this machine alone, and not to {os.fspath(folder)!r}. Give it a local"
            " save_dir; checkpoints go elsewhere by ModelCheckpoint(dirpath=...)."
        )


def _default_logger(root_dir: str) -> Logger:
    try:
        return TensorBoardLogger(save_dir=root_dir)
    except ModuleNotFoundError:
        _report_missing_tensorboard()
        return CSVLogger(save_dir=root_dir)


# Once in a program, however many trainers it makes.
@cache
def _report_missing_tensorboard() -> None:
    rank_zero_info(
        "TensorBoard is not installed: metrics are written as CSV. For TensorBoard: pip install"
        " 'equipoise[tensorboard]'."
    )


def _looks_like_a_logger(candidate: Any) -> bool:
    """Return whether a run can call an object of any class as a logger."""
    # A class has the methods, but cannot be called without an object.
    if isinstance(candidate, type):
        return False
    if is_a(candidate, Logger):
        return True
    return all(callable(getattr(candidate, name, None)) for name in _LOGGER_METHODS)
