"""Worker processes on this machine, started once, without running the user's script again.

A server forks them that has torch, Lightning and the trainer imported (multiprocessing's forkserver; see `preloading`),
so the first start takes some seconds and later ones a tenth of one. What they run travels as `transport` packs it.

    parent                                     worker
    pack the function
    start processes                            unpack, run
    wait for all                    <──        the answer of the first, or the error of any
    one failed: end the others

A worker that fails takes others with it: their connections break. So errors are gathered for a moment, and the first
cause is raised: a signal before an error, an error before what follows from it, a hang if there is nothing else.
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

import cloudpickle
import torch

from equipoise.errors import WorkerError
from equipoise.parallel import log_forwarding
from equipoise.parallel.place import slurm_job
from equipoise.parallel.preloading import preload, preloaded_modules
from equipoise.parallel.surroundings import Surroundings
from equipoise.parallel.transport import Layout, Package, pickle_error

__all__ = ["launch"]

T = TypeVar("T")

preload(__name__)
_HIDING = threading.Lock()  # one thread's workers must not start while another shows the script again
_GATHERING = 1.0  # seconds in which the causes of a failure are gathered
_ANSWERING = 10.0  # seconds in which a hung process begins to tell where it is, on a busy machine as well
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
    package, answer = Package(), Package()
    workers: list[_Worker] = []
    try:
        layout = package.pack((function, is_consequence, sys.path, Surroundings(), list(known)))
        context = get_context("forkserver")
        context.set_forkserver_preload(preloaded_modules())
        with _hidden_main():
            for rank in range(count):
                workers.append(_Worker.start(context, rank, count, package, layout, answer))
        return answer.unpack(_supervise(workers), known)  # type: ignore[no-any-return]
    finally:
        for worker in workers:
            worker.end()
        package.close()
        answer.close()


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
    """Keeps multiprocessing from importing the user's script in the workers, where it would run once more."""
    main = sys.modules["__main__"]
    with _HIDING:
        file, spec = vars(main).pop("__file__", None), main.__spec__
        main.__spec__ = None
        try:
            yield
        finally:
            main.__spec__ = spec
            if file is not None:
                main.__file__ = file


# The parent's side.


@dataclass(frozen=True)
class _Report:
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
    layout: Layout | None = None
    error: bytes | None = None
    text: str = ""
    consequence: bool = False
    signal: int | None = None

    @property
    def failed(self) -> bool:
        return bool(self.text) or self.signal is not None


@dataclass
class _Worker:
    """A process, seen from its parent."""

    rank: int
    process: Any
    connection: Connection
    stack: Connection  # where a hung process writes what it is doing
    report: _Report | None = None

    @classmethod
    def start(cls, context: Any, rank: int, count: int, package: Package, layout: Layout, answer: Package) -> "_Worker":
        here, there = context.Pipe()
        stack_here, stack_there = context.Pipe(duplex=False)
        threads = max(1, torch.get_num_threads() // count)
        options = _Options(rank, count, layout, threads, get_start_method(), log_forwarding.levels())
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
        text = "" if code < 0 else f"It left with exit code {code}."
        self.report = _Report(self.rank, time.monotonic(), signal=-code if code < 0 else None, text=text)

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


def _supervise(workers: list[_Worker]) -> Layout:
    """Waits for all workers; returns the first one's answer."""
    with _forwarded_signals(workers):
        try:
            _gather(workers, None)
        except KeyboardInterrupt:
            for worker in workers:
                worker.send_signal(signal.SIGINT)
            _gather(workers, _LEAVING)
            raise
    reports = [worker.report for worker in workers if worker.report is not None]
    if any(report.failed for report in reports) or len(reports) < len(workers):
        _raise_first_cause(workers, reports)
    layout = reports[0].layout
    assert layout is not None
    return layout


def _gather(workers: list[_Worker], seconds: float | None) -> None:
    """Takes reports until all are there, or one failed and the others had time to say why.

    Args:
        workers: All of them.
        seconds: How long at most; None: as long as it takes.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    while waiting := {worker.connection: worker for worker in workers if worker.report is None}:
        if deadline is None and any(worker.report is not None and worker.report.failed for worker in workers):
            deadline = time.monotonic() + _GATHERING
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            return
        for ready in connection.wait(list(waiting), left):
            waiting[ready].read()  # type: ignore[index]


def _raise_first_cause(workers: list[_Worker], reports: list[_Report]) -> None:
    count = len(workers)
    failed = sorted((report for report in reports if report.failed), key=lambda report: report.time)
    silent = [worker for worker in workers if worker.report is None]
    # A watchdog aborts a process that has waited in vain for another.
    waited = [report for report in failed if report.signal == signal.SIGABRT and silent]
    killed = [report for report in failed if report.signal is not None and report not in waited]
    causes = killed or [report for report in failed if not report.consequence and report not in waited]
    if not causes and silent:
        told = f"rank {silent[0].rank} of {count} hung, while others waited for it. It is here:\n\n{silent[0].where()}"
        raise WorkerError(told) from _RemoteTraceback(failed[0].text)
    # When the first gives up waiting, it may close the connections of those whose time is not up yet.
    if not causes and len(failed) == count and any(_WAITED in report.text for report in failed):
        raise WorkerError(
            f"All {count} processes waited for others, in different places, until time was up. Each came this far,"
            f" so they do not do the same:\n\n{_places(failed)}"
        ) from _RemoteTraceback(failed[0].text)
    cause = (causes or failed)[0]
    name = f"rank {cause.rank} of {count}"
    if cause.signal is not None:
        raise WorkerError(f"{name} was killed by {signal.Signals(cause.signal).name}.{_hint(cause.signal)}")
    if cause.error is None:
        raise WorkerError(f"{name} failed:\n\n{cause.text}")
    error = cloudpickle.loads(cause.error)
    error.add_note(f"Raised in {name}.")
    raise error from _RemoteTraceback(cause.text)


_WAITED = "Timed out waiting"


def _hint(number: int) -> str:
    """What a signal may mean."""
    if number == signal.SIGKILL:
        return " If nobody did so on purpose, the system may have run out of memory."
    if number == signal.SIGABRT:
        return " A library gave up: processes may have exchanged tensors of different shapes; its message is above."
    return ""


def _places(reports: list[_Report]) -> str:
    """Where each process waited: the last line of its traceback that is not torch's."""
    told = []
    for report in sorted(reports, key=lambda report: report.rank):
        frames = [frame for frame in report.text.split('  File "')[1:] if f"{os.sep}torch{os.sep}" not in frame]
        told.append(f'rank {report.rank}:   File "{frames[-1].rstrip()}' if frames else f"rank {report.rank}")
    return "\n".join(told)


class _RemoteTraceback(Exception):
    """The traceback of another process, shown as the cause of its error."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


@contextlib.contextmanager
def _forwarded_signals(workers: list[_Worker]) -> Iterator[None]:
    """Hands SIGTERM, and SIGUSR1 in a job of Slurm, on to the workers, whose trainers end after the batch."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handed_on = {signal.SIGTERM: signal.SIGTERM}
    if slurm_job() is not None and not callable(signal.getsignal(signal.SIGUSR1)):
        handed_on[signal.SIGUSR1] = signal.SIGUSR2  # SIGUSR1 asks a worker where it is

    def forward(number: int, frame: Any) -> None:
        for worker in workers:
            worker.send_signal(handed_on[signal.Signals(number)])

    before = {number: signal.signal(number, forward) for number in handed_on}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


# The worker's side.


@dataclass(frozen=True)
class _Options:
    rank: int
    count: int
    layout: Layout
    threads: int
    start_method: str
    levels: dict[str, int]


def _enter(options: _Options, package: Package, answer: Package, stack: Connection, parent: Connection) -> None:
    """What a worker does, from its first line to its last."""
    gc.freeze()  # what the server has imported lives as long as the process; a collection need not look through it
    os.setpgid(0, 0)  # Ctrl-C is the parent's to hand on, and what a worker starts ends with it
    faulthandler.register(signal.SIGUSR1, stack.fileno())
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # until a trainer listens
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    code, rank, send = 0, options.rank, log_forwarding.one_at_a_time(parent.send)
    is_consequence: Any = None
    try:
        torch.set_num_threads(options.threads)
        set_start_method(options.start_method, force=True)  # loaders start their workers as they do in the parent
        if rank == 0:
            log_forwarding.install(send, options.levels)
        function, is_consequence, path, surroundings, known = package.unpack(options.layout)
        package.close()
        sys.path[:] = path
        surroundings.restore()
        value = function(rank)
        report = _Report(rank, time.monotonic(), layout=answer.pack(value, known) if rank == 0 else None)
    except BaseException as error:
        code, report = 1, _report_of(error, rank, is_consequence)
    try:
        send(report)
    except Exception:
        code = 1
        send(_Report(rank, time.monotonic(), text=report.text or traceback.format_exc()))
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _report_of(error: BaseException, rank: int, is_consequence: Callable[[BaseException], bool] | None) -> _Report:
    now, text = time.monotonic(), "".join(traceback.format_exception(error))
    if type(error) is SystemExit:  # not Lightning's error for a SIGTERM, which is one
        return _Report(rank, now, text=f"It called sys.exit({error.code!r}).\n\n{text}")
    follows = is_consequence is not None and is_consequence(error)
    return _Report(rank, now, error=pickle_error(error), text=text, consequence=follows)


def _end_with_parent(parent: Connection) -> None:
    """Ends this process when the other end of the connection is gone."""
    with contextlib.suppress(OSError):
        connection.wait([parent])
    os._exit(1)
