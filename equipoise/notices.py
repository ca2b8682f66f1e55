"""Warnings that point at the user's line, given by the main process alone.

Python shows where a warning was raised. For a user that place is the line of their own that led to it: the call of
`fit`, say, or of `self.log`.
"""

import inspect
import sys
import warnings
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

__all__ = ["is_of_library", "rank_zero_warn", "warn", "warn_of_method"]

_LIBRARIES = ("equipoise", "torch", "lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics", "hydra")

# Methods of which the user has been warned.
_warned: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


def rank_zero_warn(message: str, *, category: type[Warning] = UserWarning) -> None:
    """Warn in the first process of a run, at the innermost line that belongs to none of the libraries.

    Args:
        message: The text.
        category: The class of the warning. Default: UserWarning.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     rank_zero_warn("Too few batches.")
        >>> str(caught[0].message)
        'Too few batches.'
    """
    if _is_first_process():
        warnings.warn(message, category, stacklevel=_level_of_user())


def warn(message: str) -> None:
    """Warn in this process, at the innermost line that belongs to none of the libraries.

    Args:
        message: The text. It names the rank where there are several processes.
    """
    warnings.warn(message, UserWarning, stacklevel=_level_of_user())


def warn_of_method(method: Callable[..., Any], message: str) -> None:
    """Warn in the first process of a run, at the line that defines a method; once for each method.

    Args:
        method: The function.
        message: The text.
    """
    if method in _warned or not _is_first_process():
        return
    _warned.add(method)
    function: Any = inspect.unwrap(method)
    if not isinstance(function, FunctionType):
        # A decorator has wrapped another callable object. The line is that of the decorator.
        function = method
    code = function.__code__
    warnings.warn_explicit(message, UserWarning, code.co_filename, code.co_firstlineno, module=method.__module__)


def _is_first_process() -> bool:
    """Return whether this is the first process, as far as Lightning knows; True if Lightning is not loaded."""
    for name in ("lightning.fabric.utilities.rank_zero", "lightning_fabric.utilities.rank_zero"):
        module = sys.modules.get(name)
        if module is not None:
            # None before a run has begun.
            rank = getattr(module.rank_zero_only, "rank", None)
            return int(rank or 0) == 0
    return True


def _level_of_user() -> int:
    """Return the `stacklevel` of the user's frame, counted from the caller of this function.

    A worker process has no line of the user's, as its main program belongs to the libraries. Then the level is that of
    the function that warns.
    """
    frame: FrameType | None = inspect.currentframe()
    assert frame is not None
    # A variable for the frame of this call would be a reference cycle, which keeps all frames with their batches.
    frame = frame.f_back
    level = 1
    while frame is not None:
        if not is_of_library(frame.f_code.co_filename):
            return level
        frame = frame.f_back
        level += 1
    return 2


@cache
def is_of_library(filename: str) -> bool:
    """Return whether a file belongs to Python, to this package or to those on which it is built.

    Args:
        filename: Its path, as frames have it.
    """
    # Compiled from a text: cells of a notebook and typed lines are the user's, frozen modules are Python's.
    if filename.startswith("<"):
        return filename.startswith("<frozen")

    # Python's standard library, without the packages installed below it.
    standard_library = f"{Path(inspect.__file__).parent}/"
    is_installed = "site-packages" in filename or "dist-packages" in filename
    if filename.startswith(standard_library) and not is_installed:
        return True
    return filename.startswith(_folders())


@cache
def _folders() -> tuple[str, ...]:
    """Return the folders of the libraries, with a separator at the end."""
    paths = [getattr(sys.modules.get(name), "__path__", ()) for name in _LIBRARIES]
    return tuple(f"{folder}/" for folders in paths for folder in folders)
