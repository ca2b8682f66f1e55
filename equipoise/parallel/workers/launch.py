"""Start worker processes on this machine and supervise them, without running the user's script again.

A server forks them that has torch, Lightning and the trainer imported (multiprocessing's forkserver; see `preloading`),
so the first start takes some seconds and later ones a tenth of one. What they run travels as `transport` packs it.

    parent                                     worker
    pack the function
    start processes                            unpack, run
    wait for all                    <──        the answer of the first, or the error of any
    one failed: end the others

A worker that fails takes others with it: their connections break. So errors are gathered for a moment, or for longer
while all of them follow from another, and the first cause is raised: a signal before an error, an error before what
follows from it, a hang if there is nothing else.
Workers end when their parent does, and leave by `os._exit` once everything is written, since threads of torch's process
groups may abort or hang an ordinary exit.
"""

import contextlib
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection, get_context, get_start_method, set_start_method
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from equipoise.parallel.communication.rank import slurm_job
from equipoise.parallel.payload.authentication import new_key, use_key
from equipoise.parallel.payload.shared_payload import DEFINITIONS, PayloadLayout, SharedPayload, define
from equipoise.parallel.workers import log_forwarding
from equipoise.parallel.workers.environment import ProcessEnvironment
from equipoise.parallel.workers.main_script import hidden, main_script
from equipoise.parallel.workers.preloading import preload, preloading
from equipoise.parallel.workers.reports import Report, causes_among, raise_first_cause, raise_unended, report_of

__all__ = ["launch"]

T = TypeVar("T")

preload(__name__)
_GATHERING = 1.0  # seconds in which causes of a failure are gathered after the first
_UNTIL_CAUSE = 10.0  # seconds until a cause is there, where all that came follows from it: the machine may be busy
_ANSWERING = 10.0  # seconds in which a hung process begins to tell where it is, on a busy machine as well
_EXIT_CODES = {255: " The server that starts processes may have been ended, or cannot tell how the process ended."}
_TERMINATING = 60.0  # seconds that workers have to end by themselves after a SIGTERM
_LEAVING = 3.0  # seconds that an interrupted worker has to release what it holds


def launch(
    function: Callable[[int], T],
    count: int,
    *,
    known: Sequence[Any] = (),
    is_consequence: Callable[[BaseException], bool] | None = None,
) -> T:
    """Runs a function in several processes and returns what it returned in the first.

    Args:
        function: Called with the number of the process, from 0.
        count: The number of processes.
        known: Objects of the caller's that an answer may refer to.
        is_consequence: Tells errors that follow from the end of another process.

    Raises:
        WorkerError: If a process was killed, left, or hung.
        Exception: The first error that a process raised, with its traceback as its cause.
    """
    package, answer = SharedPayload(), SharedPayload()
    key = new_key()
    workers: list[_Worker] = []
    try:
        of_process = (sys.path, ProcessEnvironment(), main_script())
        layout = package.pack((function, is_consequence, *of_process, list(known), DEFINITIONS))
        context = get_context("forkserver")
        with hidden(), preloading():
            for rank in range(count):
                workers.append(_Worker.start(context, rank, count, package, layout, answer, key))
        return answer.unpack(_supervise(workers), known)  # type: ignore[no-any-return]
    finally:
        for worker in workers:
            worker.end()
        package.close()
        answer.close()


# The parent's side.


@dataclass
class _Worker:
    """A process, seen from its parent."""

    rank: int
    process: Any
    connection: Connection
    stack: Connection  # where a hung process writes what it is doing
    report: Report | None = None

    @classmethod
    def start(
        cls,
        context: Any,
        rank: int,
        count: int,
        package: SharedPayload,
        layout: PayloadLayout,
        answer: SharedPayload,
        key: bytes,
    ) -> "_Worker":
        here, there = context.Pipe()
        stack_here, stack_there = context.Pipe(duplex=False)
        threads = max(1, torch.get_num_threads() // count)
        options = _Options(rank, count, layout, threads, get_start_method(), log_forwarding.levels(), key)
        arguments = (options, package, answer, stack_there, there)
        process = context.Process(target=_enter, args=arguments, name=f"rank {rank}")
        try:
            process.start()
        finally:
            there.close()
            stack_there.close()
        return cls(rank, process, here, stack_here)

    def read(self) -> None:
        """Takes its report, or notes how it ended without one."""
        try:
            received = self.connection.recv()
            if isinstance(received, logging.LogRecord):
                log_forwarding.hand_on(received)
            else:
                self.report = received
            return
        except (EOFError, OSError):
            pass
        self.process.join()
        code = self.process.exitcode
        text = "" if code < 0 else f"It left with exit code {code}.{_EXIT_CODES.get(code, '')}"
        self.report = Report(self.rank, time.monotonic(), signal=-code if code < 0 else None, text=text)

    def send_signal(self, number: int) -> None:
        if self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def end(self) -> None:
        """Waits for a worker that is done; kills any other that still runs, with all that it started."""
        if self.report is not None and not self.report.failed:
            self.process.join(_LEAVING)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)  # what it has started, too
        self.send_signal(signal.SIGKILL)
        self.process.join()
        self.connection.close()
        self.stack.close()
        self.process.close()

    def where(self) -> str:
        """What a hung process is doing."""
        self.send_signal(signal.SIGUSR1)
        told = b""
        while connection.wait([self.stack], 0.2 if told else _ANSWERING):  # it writes line by line
            if not (piece := os.read(self.stack.fileno(), 1 << 16)):
                break
            told += piece
        return told.decode(errors="replace") or "It does not answer."


def _supervise(workers: list[_Worker]) -> PayloadLayout:
    """Waits for all workers; returns the first one's answer."""
    with _forwarded_signals(workers) as terminated:
        try:
            _gather(workers, None, terminated)
        except KeyboardInterrupt:
            for worker in workers:
                worker.send_signal(signal.SIGINT)
            _gather(workers, _LEAVING)
            raise
    reports = [worker.report for worker in workers if worker.report is not None]
    silent = [worker for worker in workers if worker.report is None]
    if any(report.failed for report in reports):
        raise_first_cause(len(workers), reports, silent)
    if silent:
        raise_unended(len(workers), silent, _TERMINATING)
    layout = reports[0].layout
    assert layout is not None
    return layout


def _gather(workers: list[_Worker], seconds: float | None, terminated: int | None = None) -> None:
    """Takes reports until all are there, or one failed and the others had time to say why.

    Args:
        workers: All of them.
        seconds: How long at most; None: as long as it takes.
        terminated: A descriptor that can be read once a SIGTERM came, from when on it takes `_TERMINATING` at most.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    is_failing = has_cause = False
    while waiting := {worker.connection: worker for worker in workers if worker.report is None}:
        reports = [worker.report for worker in workers if worker.report is not None]
        if not is_failing and any(report.failed for report in reports):
            is_failing = True
            deadline = _sooner(deadline, _UNTIL_CAUSE)
        if not has_cause and causes_among(reports, list(waiting.values())):
            has_cause = True
            deadline = _sooner(deadline, _GATHERING)
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            return
        signals = [] if terminated is None else [terminated]
        for ready in connection.wait([*waiting, *signals], left):
            if ready == terminated:
                terminated = None
                deadline = time.monotonic() + _TERMINATING
            else:
                waiting[ready].read()  # type: ignore[index]


def _sooner(deadline: float | None, seconds: float) -> float:
    """Return a deadline, or the time in some seconds if that is sooner."""
    later = time.monotonic() + seconds
    return later if deadline is None else min(deadline, later)


@contextlib.contextmanager
def _forwarded_signals(workers: list[_Worker]) -> Iterator[int | None]:
    """Hands SIGTERM, and SIGUSR1 in a job of Slurm, on to the workers, whose trainers end after the batch.

    A handler of SIGTERM that was there is called as well. Yields a descriptor that can be read once a SIGTERM came;
    None outside of the main thread, which has no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    handed_on = {signal.SIGTERM: signal.SIGTERM}
    if slurm_job() is not None and not callable(signal.getsignal(signal.SIGUSR1)):
        handed_on[signal.SIGUSR1] = signal.SIGUSR2  # SIGUSR1 asks a worker where it is
    come, comes = os.pipe()
    before = {number: signal.getsignal(number) for number in handed_on}

    def forward(number: int, frame: Any) -> None:
        for worker in workers:
            worker.send_signal(handed_on[signal.Signals(number)])
        if number == signal.SIGTERM:
            os.write(comes, b".")
        handler = before[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)

    for number in handed_on:
        signal.signal(number, forward)
    try:
        yield come
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        os.close(come)
        os.close(comes)


# The worker's side.


@dataclass(frozen=True)
class _Options:
    rank: int
    count: int
    layout: PayloadLayout
    threads: int
    start_method: str
    levels: dict[str, int]
    key: bytes


def _enter(
    options: _Options, package: SharedPayload, answer: SharedPayload, stack: Connection, parent: Connection
) -> None:
    """What a worker does, from its first line to its last."""
    gc.freeze()  # what the server has imported lives as long as the process; a collection need not look through it
    os.setpgid(0, 0)  # Ctrl-C is the parent's to hand on, and what a worker starts ends with it
    faulthandler.register(signal.SIGUSR1, stack.fileno())
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # until a trainer listens
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    use_key(options.key)
    code, rank, send = 0, options.rank, log_forwarding.one_at_a_time(parent.send)
    is_consequence: Any = None
    try:
        torch.set_num_threads(options.threads)
        set_start_method(options.start_method, force=True)  # loaders start their workers as they do in the parent
        if rank == 0:
            log_forwarding.install(send, options.levels)
        function, is_consequence, path, surroundings, script, known, definitions = package.unpack(options.layout)
        package.close()
        # What a loader's worker sends to this one names classes of the script by their place in `__main__`.
        define(definitions)
        script.show()
        sys.path[:] = path
        surroundings.restore()
        value = function(rank)
        report = Report(rank, time.monotonic(), layout=answer.pack(value, known) if rank == 0 else None)
    except BaseException as error:
        code, report = 1, report_of(error, rank, is_consequence)
    try:
        send(report)
    except Exception:
        code = 1
        send(Report(rank, time.monotonic(), text=report.text or traceback.format_exc()))
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _end_with_parent(parent: Connection) -> None:
    """Ends this process when the other end of the connection is gone."""
    with contextlib.suppress(OSError):
        connection.wait([parent])
    os._exit(1)
