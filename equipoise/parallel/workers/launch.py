"""Start worker processes on this machine and supervise them, without running the user's script again.

A server forks them that has torch, Lightning and the trainer imported (multiprocessing's forkserver; see `preloading`),
so the first start takes some seconds and later ones a tenth of one. Their function travels in a `SharedPayload`.

    parent                                     worker
    pack the function
    start processes                            unpack, run
    wait for all                    <──        result of the first, or error of any
    one failed: end the others

A worker that fails breaks the connections of others, which fail, too. So reports are gathered for a moment, or for
longer while all of them are such consequences. Then the first cause is raised: a signal before an error, an error
before its consequences, a hang if there is nothing else.
"""

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, get_context
from typing import Any, TypeVar

from equipoise.parallel.communication.rank import slurm_job
from equipoise.parallel.payload.authentication import new_key
from equipoise.parallel.payload.shared_payload import PayloadLayout, SharedPayload
from equipoise.parallel.workers.main_script import hidden
from equipoise.parallel.workers.messages.reports import causes_among, raise_first_cause, raise_unended
from equipoise.parallel.workers.preloading import preload, preloading
from equipoise.parallel.workers.worker_main import Job
from equipoise.parallel.workers.worker_process import Task, WorkerProcess

__all__ = ["launch"]

T = TypeVar("T")

preload(__name__)

# Seconds in which reports are gathered after the first cause of a failure.
_GATHERING = 1.0
# Seconds until a cause arrives after its consequences, on a busy machine.
_UNTIL_CAUSE = 10.0
# Seconds that workers have to end by themselves after a SIGTERM.
_TERMINATING = 60.0
# Seconds that interrupted workers have to release their resources.
_LEAVING = 3.0


def launch(
    function: Callable[[int], T],
    count: int,
    *,
    known: Sequence[Any] = (),
    is_consequence: Callable[[BaseException], bool] | None = None,
    timeout: float = math.inf,
) -> T:
    """Run a function in several processes, and return its result in the first.

    Args:
        function: Called with the number of the process, from 0.
        count: The number of processes.
        known: Objects of the caller that the result may refer to. Default: none.
        is_consequence: Returns True for errors that follow from the end of another process. Default: None, no such
            check.
        timeout: Seconds for which the processes wait for one another, of which a quarter at most is added before one
            that hangs is named. Default: without limit.

    Raises:
        WorkerError: If a process was killed, left, or hung.
        Exception: The first error that a process raised, with its traceback as its cause.
    """
    payload = SharedPayload()
    result = SharedPayload()
    workers: list[WorkerProcess] = []
    try:
        # 1. Pack the function, with the settings of this process.
        key = new_key()
        job = Job.in_this_process(function, is_consequence, known)
        task = Task(count, payload, payload.pack(job), result, key)
        with _received_signals() as signals:
            # 2. Start the workers. They must not run the user's script again.
            context = get_context("forkserver")
            with hidden(), preloading():
                for rank in range(count):
                    worker = WorkerProcess.start(context, rank, task)
                    workers.append(worker)
            # 3. Wait for all, and unpack the result of the first.
            layout_of_result = _supervise(workers, until_cause=min(_UNTIL_CAUSE, timeout / 4), signals=signals)
        return result.unpack(layout_of_result, known)  # type: ignore[no-any-return]
    finally:
        for worker in workers:
            worker.end()
        payload.close()
        result.close()


def _supervise(workers: list[WorkerProcess], *, until_cause: float, signals: int | None) -> PayloadLayout:
    """Wait for all workers, and return the layout of the first one's result; see `_gather_reports`."""
    # 1. Gather reports.
    try:
        _gather_reports(workers, until_cause=until_cause, signals=signals)
    except KeyboardInterrupt:
        for worker in workers:
            worker.send_signal(signal.SIGINT)
        _gather_reports(workers, until_cause=until_cause, seconds=_LEAVING)
        raise
    # 2. Raise the first cause of a failure.
    reports = [worker.report for worker in workers if worker.report is not None]
    silent = [worker for worker in workers if worker.report is None]
    if any(report.failed for report in reports):
        raise_first_cause(len(workers), reports, silent)
    if silent:
        raise_unended(len(workers), silent, _TERMINATING)
    layout = reports[0].layout
    assert layout is not None
    return layout


def _gather_reports(
    workers: list[WorkerProcess], *, until_cause: float, seconds: float | None = None, signals: int | None = None
) -> None:
    """Receive reports until all have arrived, or one failed and the others had time to report the cause.

    Args:
        workers: All workers.
        until_cause: Longest time in seconds after a failure that may follow from another one.
        seconds: Longest time in seconds. Default: None, without limit.
        signals: A descriptor that yields the signals to forward, a byte each. From a SIGTERM on, the time is
            `_TERMINATING` at most. Default: None, no signal is forwarded.
    """
    deadline = _Deadline(seconds)
    has_failure = False
    has_cause = False
    while True:
        # 1. Find the workers that have not reported. A failure, and then its cause, shorten the time of the rest.
        reports = [worker.report for worker in workers if worker.report is not None]
        silent = {worker.connection: worker for worker in workers if worker.report is None}
        if not silent:
            return
        if not has_failure and any(report.failed for report in reports):
            has_failure = True
            deadline.shorten(until_cause)
        if not has_cause and causes_among(reports, list(silent.values())):
            has_cause = True
            deadline.shorten(_GATHERING)
        remaining = deadline.remaining()
        if remaining is not None and remaining <= 0:
            return
        # 2. Wait for a message or a signal.
        sources: list[Any] = list(silent)
        if signals is not None:
            sources.append(signals)
        for source in connection.wait(sources, remaining):
            if source == signals:
                number = os.read(signals, 1)[0]
                for worker in workers:
                    worker.send_signal(number)
                if number == signal.SIGTERM:
                    deadline.shorten(_TERMINATING)
            else:
                silent[source].read()  # type: ignore[index]


class _Deadline:
    """The end of a time, by the monotonic clock; None: without end."""

    def __init__(self, seconds: float | None) -> None:
        self._end: float | None = None
        if seconds is not None:
            self._end = time.monotonic() + seconds

    def shorten(self, seconds: float) -> None:
        """End in some seconds, unless the end is sooner."""
        end = time.monotonic() + seconds
        if self._end is None or end < self._end:
            self._end = end

    def remaining(self) -> float | None:
        """Return the seconds until the end; None if there is no end."""
        if self._end is None:
            return None
        return self._end - time.monotonic()


@contextlib.contextmanager
def _received_signals() -> Iterator[int | None]:
    """Receive the signals that end the workers' trainers after the batch: SIGTERM, and SIGUSR1 in a job of Slurm.

    A handler of SIGTERM that the program has set is called as well. Yields a descriptor that holds the number to send
    to the workers for each signal, also for one that arrived before they were started; None outside of the main
    thread, which has no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    # 1. Choose the signals. SIGUSR1 asks a worker for its stack, so the workers receive another signal for it.
    signals_of_workers = {signal.SIGTERM: signal.SIGTERM}
    if slurm_job() is not None and not callable(signal.getsignal(signal.SIGUSR1)):
        signals_of_workers[signal.SIGUSR1] = signal.SIGUSR2
    earlier_handlers = {number: signal.getsignal(number) for number in signals_of_workers}
    readable, writable = os.pipe()

    def receive(number: int, frame: Any) -> None:
        received = signal.Signals(number)
        os.write(writable, bytes([signals_of_workers[received]]))
        handler = earlier_handlers[received]
        if callable(handler):
            handler(number, frame)

    # 2. Handle them until all workers have ended.
    for number in signals_of_workers:
        signal.signal(number, receive)
    try:
        yield readable
    finally:
        for number, handler in earlier_handlers.items():
            # A handler that was not set from Python reads as None.
            if handler is None:
                handler = signal.SIG_DFL
            signal.signal(number, handler)
        os.close(readable)
        os.close(writable)
