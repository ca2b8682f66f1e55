"""Reports of worker processes at their end, and the first cause among several failures."""

import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

import cloudpickle

from equipoise.errors import WorkerError
from equipoise.parallel.payload.shared_payload import PayloadLayout, pickle_error

__all__ = ["Report", "Worker", "causes_among", "raise_first_cause", "raise_unended", "report_of"]

_ATTEMPTS = 3  # at a report, which a signal's handler may break off


class Worker(Protocol):
    """A worker process, as its parent sees it."""

    @property
    def rank(self) -> int:
        """Its number."""

    def where(self) -> str:
        """Return what it is doing."""


@dataclass(frozen=True)
class Report:
    """How a worker ended.

    Attributes:
        rank: Which.
        time: When, by the clock that all processes share.
        layout: Where the answer lies, if there is one.
        error: What it raised, pickled; None if that cannot be sent.
        text: Its traceback.
        consequence: Whether it follows from the end of another.
        signal: What killed it, if something did.
    """

    rank: int
    time: float
    layout: PayloadLayout | None = None
    error: bytes | None = None
    text: str = ""
    consequence: bool = False
    signal: int | None = None

    @property
    def failed(self) -> bool:
        """Whether the worker did not end as it should."""
        return bool(self.text) or self.signal is not None


# The worker's side.


def report_of(error: BaseException, rank: int, is_consequence: Callable[[BaseException], bool] | None) -> Report:
    """Return the report of a worker that raised an error.

    A child process of the worker may end meanwhile, as a loader's worker does, and the handler of that signal raises an
    error of its own into whatever runs. So the signal is turned off, and the report made again if it was broken off.
    """
    for _ in range(_ATTEMPTS):
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return _report_once(error, rank, is_consequence)
        except Exception:
            continue
    return Report(rank, time.monotonic(), text=f"{type(error).__name__}, whose traceback cannot be made.")


def _report_once(error: BaseException, rank: int, is_consequence: Callable[[BaseException], bool] | None) -> Report:
    now, text = time.monotonic(), "".join(traceback.format_exception(error))
    if type(error) is SystemExit:  # not Lightning's error for a SIGTERM, which is one
        return Report(rank, now, text=f"It called sys.exit({error.code!r}).\n\n{text}")
    follows = is_consequence is not None and is_consequence(error)
    return Report(rank, now, error=pickle_error(error), text=text, consequence=follows)


# The parent's side.


def causes_among(reports: Sequence[Report], silent: Sequence[Worker]) -> list[Report]:
    """Return the failures that may be the cause of the others, the first one first; empty if all follow from something.

    Args:
        reports: Those of the workers that have ended.
        silent: The others.
    """
    failed = sorted((report for report in reports if report.failed), key=lambda report: report.time)
    # A watchdog aborts a process that has waited in vain for another.
    waited = [report for report in failed if report.signal == signal.SIGABRT and silent]
    killed = [report for report in failed if report.signal is not None and report not in waited]
    return killed or [report for report in failed if not report.consequence and report not in waited]


def raise_first_cause(count: int, reports: list[Report], silent: Sequence[Worker]) -> NoReturn:
    """Raise what went wrong first: a signal before an error, an error before what follows from it, then a hang.

    Args:
        count: The number of processes.
        reports: Those of the workers that have ended.
        silent: The others.
    """
    failed = sorted((report for report in reports if report.failed), key=lambda report: report.time)
    causes = causes_among(reports, silent)
    if not causes and silent:
        told = f"rank {silent[0].rank} of {count} hung, while others waited for it. It is here:\n\n{silent[0].where()}"
        raise WorkerError(told) from RemoteTraceback(failed[0].text)
    # When the first gives up waiting, it may close the connections of those whose time is not up yet.
    if not causes and len(failed) == count and any(_WAITED in report.text for report in failed):
        raise WorkerError(
            f"All {count} processes waited for others, in different places, until time was up. Each came this far,"
            f" so they do not do the same:\n\n{_places(failed)}"
        ) from RemoteTraceback(failed[0].text)
    cause = (causes or failed)[0]
    name = f"rank {cause.rank} of {count}"
    if cause.signal is not None:
        raise WorkerError(f"{name} was killed by {signal.Signals(cause.signal).name}.{_hint(cause.signal)}")
    if cause.error is None:
        raise WorkerError(f"{name} failed:\n\n{cause.text}")
    error = cloudpickle.loads(cause.error)
    error.add_note(f"Raised in {name}.")
    raise error from RemoteTraceback(cause.text)


_WAITED = "Timed out waiting"


def _hint(number: int) -> str:
    """What a signal may mean."""
    if number == signal.SIGKILL:
        return " If nobody did so on purpose, the system may have run out of memory."
    if number == signal.SIGABRT:
        return " A library gave up: processes may have exchanged tensors of different shapes; its message is above."
    return ""


def _places(reports: list[Report]) -> str:
    """Where each process waited: the last line of its traceback that is not torch's."""
    told = []
    for report in sorted(reports, key=lambda report: report.rank):
        frames = [frame for frame in report.text.split('  File "')[1:] if f"{os.sep}torch{os.sep}" not in frame]
        told.append(f'rank {report.rank}:   File "{frames[-1].rstrip()}' if frames else f"rank {report.rank}")
    return "\n".join(told)


class RemoteTraceback(Exception):
    """The traceback of another process, shown as the cause of its error."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


def raise_unended(count: int, silent: Sequence[Worker], seconds: float) -> NoReturn:
    """Raise that workers did not end after a SIGTERM."""
    first = silent[0]
    raise WorkerError(
        f"rank {first.rank} of {count} did not end within {seconds:g} seconds after SIGTERM, so all were ended. It was"
        f" here:\n\n{first.where()}"
    )
