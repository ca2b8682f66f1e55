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
from equipoise.names.tracebacks import RemoteTraceback, shortened
from equipoise.parallel.payload.object_bytes import pickle_error
from equipoise.parallel.payload.shared_payload import PayloadLayout

__all__ = ["Report", "causes_among", "raise_first_cause", "raise_unended", "report_of"]

# Attempts to create a report, which a signal's handler may interrupt.
_ATTEMPTS = 3
# The beginning of a frame in the text of a traceback.
_FRAME = '  File "'
# Part of the message of an exchange that reached its time limit.
_WAITED = "Timed out waiting"
# The file of torch in which a process waits for an exchange.
_EXCHANGE = "distributed_c10d.py"

# Returns True for errors that follow from the end of another process.
ConsequenceCheck = Callable[[BaseException], bool]


@dataclass(frozen=True)
class Report:
    """Report of the end of a worker.

    Attributes:
        rank: Number of the worker.
        time: Time of its end in seconds, by the monotonic clock that all processes share.
        layout: Layout of its result in the shared file; None without a result.
        error: Its error, pickled; None if that cannot be sent.
        text: Its traceback; of a killed worker, the stack that it wrote, empty if it wrote none.
        consequence: True if the error follows from the end of another worker.
        signal: Number of the signal that killed it; None if no signal did.
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
        """True if the worker raised an error, exited early or was killed."""
        has_traceback = bool(self.text)
        was_killed = self.signal is not None
        return has_traceback or was_killed


# The worker's side.


def report_of(error: BaseException, rank: int, is_consequence: ConsequenceCheck | None) -> Report:
    """Return the report of a worker that raised an error.

    A child process of the worker may end meanwhile, as a loader's worker does, and the handler of that signal raises
    another error in any statement. So this turns the signal off, and creates the report again if it was interrupted.

    Args:
        error: Error of the worker.
        rank: Number of the worker.
        is_consequence: Returns True for errors that follow from the end of another process; None for no such check.
    """
    for _ in range(_ATTEMPTS):
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return _report_once(error, rank, is_consequence)
        except Exception:
            continue
    # The traceback is what failed, so the report states the type alone.
    now = time.monotonic()
    return Report(rank, now, text=f"{type(error).__name__}, whose traceback cannot be made.")


def _report_once(error: BaseException, rank: int, is_consequence: ConsequenceCheck | None) -> Report:
    now = time.monotonic()
    text = "".join(traceback.format_exception(shortened(error)))
    # Lightning's error for a SIGTERM derives from SystemExit and is not meant here.
    if type(error) is SystemExit:
        return Report(rank, now, text=f"It called sys.exit({error.code!r}).\n\n{text}")
    follows = is_consequence is not None and is_consequence(error)
    return Report(rank, now, error=pickle_error(error), text=text, consequence=follows)


# The parent's side.


class Worker(Protocol):
    """A worker process, as its parent sees it.

    Attributes:
        rank: Number of the worker.
    """

    rank: int

    def where(self) -> str:
        """Return the present stack of the worker."""


def causes_among(reports: Sequence[Report], silent: Sequence[Worker]) -> list[Report]:
    """Return the failures that may have caused all other failures, in order of time; empty if none may have.

    Args:
        reports: Reports of the workers that have ended.
        silent: Workers without a report.
    """
    killed = []
    raised = []
    for report in _failures(reports):
        # A watchdog aborts a process that has waited too long for a silent one.
        if report.signal == signal.SIGABRT and silent:
            continue
        if report.signal is not None:
            killed.append(report)
        if not report.consequence:
            raised.append(report)
    return killed or raised


def _failures(reports: Sequence[Report]) -> list[Report]:
    """Return the reports of failed workers, the first failure first."""
    failures = [report for report in reports if report.failed]
    return sorted(failures, key=lambda report: report.time)


def raise_first_cause(count: int, reports: list[Report], silent: Sequence[Worker]) -> NoReturn:
    """Raise the first cause: a signal before an error, an error before its consequences, then a hang.

    Args:
        count: Number of processes.
        reports: Reports of the workers that have ended; one at least has failed.
        silent: Workers without a report.
    """
    failed = _failures(reports)
    causes = causes_among(reports, silent)
    # 1. Without a cause, a silent worker hangs.
    if not causes and silent:
        hung = silent[0]
        stack = hung.where()
        message = f"rank {hung.rank} of {count} hung, while others waited for it. It is here:\n\n{stack}"
        raise WorkerError(message) from RemoteTraceback(failed[0].text)
    # 2. Without a silent worker, all waited in different places. The first one to stop waiting may close connections
    # before the time of the rest is up, so one message of a timeout is enough.
    all_failed = len(failed) == count
    timed_out = any(_WAITED in report.text for report in failed)
    if not causes and all_failed and timed_out:
        places = _places(failed)
        raise WorkerError(
            f"All {count} processes waited for others, in different places, until time was up. Each came this far,"
            " so they do not do the same. If random numbers decide what a step does, draw them from a generator with"
            f" the same seed in all processes: the global ones differ.\n\n{places}"
        ) from RemoteTraceback(failed[0].text)
    # 3. Raise the first cause in this process.
    cause = failed[0]
    if causes:
        cause = causes[0]
    name = f"rank {cause.rank} of {count}"
    if cause.signal is not None:
        signal_name = signal.Signals(cause.signal).name
        hint = _hint(cause.signal, cause.text)
        place = f" It was here:\n\n{cause.text}" if cause.text else ""
        raise WorkerError(f"{name} was killed by {signal_name}.{hint}{place}")
    if cause.error is None:
        raise WorkerError(f"{name} failed:\n\n{cause.text}")
    error = cloudpickle.loads(cause.error)
    error.add_note(f"Raised in {name}.")
    # An error that explains itself may have no frame of the user's. Then its message would only appear twice.
    has_frames = _FRAME in cause.text
    raise error from (RemoteTraceback(cause.text) if has_frames else None)


def _hint(number: int, stack: str) -> str:
    """Return the likely reason for a signal, as sentences of the message, from the stack that the process wrote."""
    if number == signal.SIGKILL:
        return " Unless this was on purpose, the system may have run out of memory."
    if number != signal.SIGABRT:
        return ""
    hint = " A library stopped the process; its message is above."
    if _EXCHANGE in stack:
        hint += " Processes may have exchanged tensors of different shapes."
    return hint


def _places(reports: list[Report]) -> str:
    """Return the place where each process waited: the last frame of its traceback outside of torch."""
    torch_folder = f"{os.sep}torch{os.sep}"
    lines = []
    for report in sorted(reports, key=lambda report: report.rank):
        line = f"rank {report.rank}"
        # The text before the first frame is the heading of the traceback.
        _, *frames = report.text.split(_FRAME)
        for frame in frames:
            if torch_folder not in frame:
                line = f'rank {report.rank}:   File "{frame.rstrip()}'
        lines.append(line)
    return "\n".join(lines)


def raise_unended(count: int, silent: Sequence[Worker], seconds: float) -> NoReturn:
    """Raise that workers did not end after a SIGTERM."""
    first = silent[0]
    stack = first.where()
    raise WorkerError(
        f"rank {first.rank} of {count} did not end within {seconds:g} seconds after SIGTERM, so all were ended. It was"
        f" here:\n\n{stack}"
    )
