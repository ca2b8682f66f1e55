"""Tracebacks without the frames of Equipoise that lie between a user's script and the user's line, or the message."""

import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import ParamSpec, TypeVar

from equipoise.errors import CheckpointError, ConfigurationError, StepError, SweepError, WorkerError

__all__ = ["FULL", "RemoteTraceback", "shortened", "shortens_tracebacks"]

P = ParamSpec("P")
R = TypeVar("R")

# Environment variable that keeps all frames, for those who work on Equipoise.
FULL = "EQUIPOISE_FULL_TRACEBACK"
# The package, and those that call it for the command.
_OURS = ("equipoise", "hydra", "omegaconf")
# Packages through which Equipoise calls a user's code.
_BETWEEN = ("contextlib", "functools", "lightning", "lightning_fabric", "pytorch_lightning", "threading", "torch")
# Their messages say what to do; where Equipoise noticed it does not help. Neither does where an interrupt found it.
_EXPLAINED = (CheckpointError, ConfigurationError, StepError, SweepError, WorkerError, KeyboardInterrupt)


class RemoteTraceback(Exception):
    """The traceback of another process, shown as the cause of its error."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


def shortened(error: BaseException) -> BaseException:
    """Return an error whose traceback shows the user's frames and the cause.

    If Equipoise raised the error with an explanation, or it is an interrupt, only the user's frames remain. For any
    other error, the frames of Equipoise before the last frame of the user are removed. So everything that a user's line
    calls remains, and an error within Equipoise is shown as it is. The environment variable
    `EQUIPOISE_FULL_TRACEBACK=1` turns this off.

    Args:
        error: The error; its traceback is replaced.
    """
    if os.environ.get(FULL):
        return error
    links = list(_links(error.__traceback__))
    # The traceback of another process shows where its error was raised.
    if isinstance(error, _EXPLAINED) or isinstance(error.__cause__, RemoteTraceback):
        remaining = [link for link in links if _package(link) not in _OURS + _BETWEEN]
    else:
        remaining = _without_ours_before_users(links)
    shorter: TracebackType | None = None
    for link in reversed(remaining):
        shorter = TracebackType(shorter, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return error.with_traceback(shorter)


def _without_ours_before_users(links: Sequence[TracebackType]) -> list[TracebackType]:
    """Return the frames without those of Equipoise that come before the last one of the user's."""
    last_of_user = 0
    for index, link in enumerate(links):
        if _is_users(_package(link)):
            last_of_user = index
    before = [link for link in links[:last_of_user] if _package(link) not in _OURS]
    return [*before, *links[last_of_user:]]


def _links(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _package(link: TracebackType) -> str:
    """Return the name of the outermost package whose code a frame runs."""
    module_names = link.tb_frame.f_globals
    # A module that is run by `python -m` has a package, and another name.
    name = module_names.get("__package__") or module_names.get("__name__") or ""
    return str(name).partition(".")[0]


def _is_users(package: str) -> bool:
    return package not in _OURS + _BETWEEN and package not in sys.stdlib_module_names - {"__main__"}


def shortens_tracebacks(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate an entry point, so that errors reach its caller with a short traceback.

    Args:
        function: The entry point.
    """

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> R:
        try:
            return function(*arguments, **options)
        except (Exception, KeyboardInterrupt) as error:
            # Python adds no frame for a `raise` of the error at hand, so this one stays away as well.
            shortened(error)
            raise

    return call
