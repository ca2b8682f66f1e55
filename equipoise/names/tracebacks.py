"""Tracebacks without the frames of Equipoise that lie between a user's script and the user's line, or the message."""

import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from opcode import opmap
from types import FunctionType, TracebackType
from typing import Any, ParamSpec, TypeVar

from equipoise.errors import CheckpointError, ConfigurationError, StepError, SweepError, WorkerError

__all__ = ["FULL", "RemoteTraceback", "shortened", "shortens_tracebacks", "with_short_tracebacks"]

P = ParamSpec("P")
R = TypeVar("R")

# Environment variable that keeps all frames, for those who work on Equipoise.
FULL = "EQUIPOISE_FULL_TRACEBACK"
# The package, and those that call it for the command.
_OURS = ("equipoise", "hydra", "omegaconf")
_REMOVED = (*_OURS, "importlib")
# Packages through which Equipoise calls a user's code.
_BETWEEN = ("contextlib", "functools", "lightning", "lightning_fabric", "pytorch_lightning", "threading", "torch")
# Their messages say what to do; where Equipoise noticed it does not help. Neither does where an interrupt found it.
_EXPLAINED = (CheckpointError, ConfigurationError, StepError, SweepError, WorkerError, KeyboardInterrupt)
_RAISE = opmap["RAISE_VARARGS"]


class RemoteTraceback(Exception):
    """The traceback of another process, shown as the cause of its error."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


def shortened(error: BaseException) -> BaseException:
    """Return an error whose traceback, like those of its causes, shows the user's frames and the cause.

    If Equipoise raised the error with an explanation, or it is an interrupt, only the user's frames remain, and of its
    causes those of libraries. For any other error, the frames of Equipoise before the last frame of the user, or else
    before those of a library that raised it, are removed. So everything that a user's line calls remains, and a fault
    within Equipoise is shown as it is. The environment variable `EQUIPOISE_FULL_TRACEBACK=1` turns this off.

    Args:
        error: The error; its traceback is replaced.
    """
    if os.environ.get(FULL):
        return error
    link: BaseException | None = error
    chain: list[BaseException] = []
    is_explained = False
    while link is not None and all(link is not other for other in chain):
        chain.append(link)
        is_explained = _shorten(link, explains=is_explained) or is_explained
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return error


def _shorten(error: BaseException, *, explains: bool) -> bool:
    """Shorten the traceback of one error; return True if its message says what to do.

    Args:
        error: The error.
        explains: True for the cause of an error whose message says what to do.
    """
    links = list(_links(error.__traceback__))
    is_explained = _is_explained(error, links)
    if explains:
        remaining = [link for link in links if _package(link) not in _REMOVED]
    elif is_explained:
        remaining = [link for link in links if _package(link) not in _REMOVED + _BETWEEN]
    else:
        remaining = _without_ours_before_cause(links)
    shorter: TracebackType | None = None
    for link in reversed(remaining):
        shorter = TracebackType(shorter, link.tb_frame, link.tb_lasti, link.tb_lineno)
    error.__traceback__ = shorter
    return is_explained


def _is_explained(error: BaseException, links: Sequence[TracebackType]) -> bool:
    """Return True if the message says what to do: the error is of ours, raised by a `raise` of ours, or of a worker."""
    # The traceback of another process shows where its error was raised.
    if isinstance(error, _EXPLAINED) or isinstance(error.__cause__, RemoteTraceback):
        return True
    # A failed `assert` is a fault of ours.
    if not links or isinstance(error, AssertionError):
        return False
    last = links[-1]
    return _package(last) in _OURS and last.tb_frame.f_code.co_code[last.tb_lasti] == _RAISE


def _without_ours_before_cause(links: Sequence[TracebackType]) -> list[TracebackType]:
    """Return the frames without those of Equipoise before the last one of the user's, or else of another library's."""
    users = [index for index, link in enumerate(links) if _is_users(_package(link))]
    last = users[-1] if users else 0
    if not users and links and _package(links[-1]) not in (*_OURS, *sys.stdlib_module_names):
        last = len(links) - 1
    before = [link for link in links[:last] if _package(link) not in _REMOVED]
    return [*before, *links[last:]]


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

    Arguments that do not fit are refused with the nearest names.

    Args:
        function: The entry point.
    """

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> R:
        try:
            try:
                return function(*arguments, **options)
            except TypeError as error:
                traceback = error.__traceback__
                # Nothing within the function was reached.
                if traceback is not None and traceback.tb_next is None:
                    from equipoise.names.misfits import refuse_misfits

                    refuse_misfits(function, arguments, options)
                raise
        except (Exception, KeyboardInterrupt) as error:
            # Python adds no frame for a `raise` of the error at hand, so this one stays away as well.
            shortened(error)
            raise

    return call


def with_short_tracebacks(public: Any) -> Any:
    """Return a public function or class whose errors reach its caller with short tracebacks; anything else as it is.

    The constructor of a class is decorated in place, also where a class of Equipoise inherits it.

    Args:
        public: What a public name stands for.
    """
    if not isinstance(public, type):
        return _decorated(public)
    owner = next(kind for kind in public.__mro__ if "__init__" in vars(kind))
    constructor = vars(owner)["__init__"]
    if _decorated(constructor) is not constructor:
        owner.__init__ = _decorated(constructor)  # type: ignore[misc]
    return public


def _decorated(function: Any) -> Any:
    """Return a function of Equipoise with `shortens_tracebacks`; one that has it, and anything else, as it is."""
    # The constructor of a protocol is Python's, and that of an exception is no function.
    is_ours = isinstance(function, FunctionType) and function.__module__.startswith("equipoise.")
    if is_ours and function.__code__ is not _CODE:
        return shortens_tracebacks(function)
    return function


_CODE = shortens_tracebacks(shortened).__code__
