"""A worker process from its first line to its last."""

import contextlib
import faulthandler
import gc
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_start_method, set_start_method
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import torch

from equipoise.errors import ConfigurationError, WorkerError
from equipoise.parallel.payload.authentication import use_key
from equipoise.parallel.payload.object_pickling import DEFINITIONS, define
from equipoise.parallel.payload.shared_payload import PayloadLayout, SharedPayload
from equipoise.parallel.workers.environment import ProcessEnvironment
from equipoise.parallel.workers.main_script import MainScript, main_script
from equipoise.parallel.workers.messages import log_forwarding
from equipoise.parallel.workers.messages.reports import Report, report_of

__all__ = ["Job", "Question", "Task", "call_in_parent", "run_worker", "send_to_parent"]

T = TypeVar("T")

# The function that sends to the parent; none in a process that is no worker.
_senders: list[Callable[[Any], None]] = []
# Answers of the parent to the questions of this process.
_answers: SimpleQueue[tuple[Any, Exception | None]] = SimpleQueue()


@dataclass(frozen=True)
class Task:
    """Objects that all workers of a run receive when they start, with settings of the process that creates this one.

    Attributes:
        count: The number of workers.
        payload: Contains the job.
        layout: The layout of the payload.
        result: Receives the result of the first worker.
        key: Secret with which the processes of the run sign their objects.
        threads: Number of threads that torch uses for an operation in the parent; its workers share them.
        start_method: The start method of multiprocessing in the parent: "fork", "spawn" or "forkserver".
        levels: Levels of the parent's loggers by name.
    """

    count: int
    payload: SharedPayload
    layout: PayloadLayout
    result: SharedPayload
    key: bytes
    threads: int = field(default_factory=torch.get_num_threads)
    start_method: str = field(default_factory=get_start_method)
    levels: dict[str, int] = field(default_factory=log_forwarding.levels)


class Job(NamedTuple):
    """Everything that a worker unpacks before it runs the function.

    Attributes:
        function: The function, called with the rank.
        is_consequence: Returns True for errors that follow from the end of another process; None for no such check.
        shared_objects: Objects of the caller that the result may refer to.
        path: The parent's `sys.path`.
        environment: The parent's settings.
        script: The parent's script.
        definitions: Classes of the script. What a loader's worker sends names them by their place in `__main__`.
    """

    function: Callable[[int], Any]
    is_consequence: Callable[[BaseException], bool] | None
    shared_objects: Sequence[Any]
    path: list[str]
    environment: ProcessEnvironment
    script: MainScript
    definitions: Any

    @classmethod
    def in_this_process(
        cls,
        function: Callable[[int], Any],
        is_consequence: Callable[[BaseException], bool] | None,
        shared_objects: Sequence[Any],
    ) -> "Job":
        """Return a job with the settings of this process."""
        return cls(
            function=function,
            is_consequence=is_consequence,
            shared_objects=list(shared_objects),
            path=sys.path,
            environment=ProcessEnvironment(),
            script=main_script(),
            definitions=DEFINITIONS,
        )

    def prepare(self) -> None:
        """Apply the parent's settings to this process."""
        define(self.definitions)
        self.script.show()
        sys.path[:] = self.path
        self.environment.restore()


def run_worker(rank: int, task: Task, stack: Connection, parent: Connection) -> None:
    """Run the job of a worker, report to the parent, and leave.

    Args:
        rank: Number of the worker, from 0.
        task: The task that all workers receive.
        stack: Connection to which a worker writes its stack when it hangs or aborts.
        parent: Connection for log records and the report.
    """
    _set_up_process(task, stack, parent)
    # 1. Run the function. What it returns, and the job, live until the process ends: to release them may take time.
    # Threads of the job may log while the report is sent.
    send = log_forwarding.one_at_a_time(parent.send)
    is_consequence = None
    try:
        _set_up_libraries(rank, task, send)
        job = _read_job(task)
        is_consequence = job.is_consequence
        task.payload.close()
        job.prepare()
        value = job.function(rank)
        layout = None
        if rank == 0:
            layout = task.result.pack(value, job.shared_objects)
        report = Report(rank, time.monotonic(), layout=layout)
    except BaseException as error:
        report = report_of(error, rank, is_consequence)
    # 2. Report.
    has_failed = report.failed
    try:
        send(report)
    except Exception:
        has_failed = True
        text = report.text or traceback.format_exc()
        send(Report(rank, time.monotonic(), text=text))
    # 3. Leave. Threads of torch's process groups may abort or hang an ordinary exit.
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(int(has_failed))


def _read_job(task: Task) -> Job:
    """Return the job.

    Raises:
        ConfigurationError: If an object that was sent with it cannot be created here.
    """
    try:
        job: Job = task.payload.unpack(task.layout)
    except Exception as error:
        raise ConfigurationError(
            "An object of the module, the data or a callback was sent to another process, but cannot be created there:"
            f" {type(error).__name__}: {error}. Create it in `setup` or on first use, or leave it out in"
            " `__getstate__`."
        ) from error
    return job


def _set_up_process(task: Task, stack: Connection, parent: Connection) -> None:
    """Set what the process needs before it can fail; see `run_worker`."""
    # 1. Objects that the server has imported live as long as the process, so no collection needs to examine them.
    gc.freeze()
    # 2. In a group of its own, the worker ends together with processes that it starts. Only the parent gets Ctrl-C.
    os.setpgid(0, 0)
    # 3. SIGUSR1 asks for the stack, and a crash writes it: a long one ends early rather than wait for a reader.
    # SIGUSR2 has no effect until a trainer handles it.
    os.set_blocking(stack.fileno(), False)
    faulthandler.register(signal.SIGUSR1, stack.fileno())
    faulthandler.enable(stack.fileno())
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    # 4. The worker ends with its parent, and trusts the objects of this run alone.
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    use_key(task.key)


def _set_up_libraries(rank: int, task: Task, send: Callable[[Any], None]) -> None:
    """Set what torch, multiprocessing and logging need in a worker."""
    _senders[:] = [send]
    torch.set_num_threads(max(1, task.threads // task.count))
    # Loaders start their workers as they do in the parent.
    set_start_method(task.start_method, force=True)
    if rank == 0:
        log_forwarding.install(send, task.levels)


def _end_with_parent(parent: Connection) -> None:
    """Receive answers of the parent, and end this process when the other end of the connection is closed."""
    while True:
        try:
            content = parent.recv_bytes()
        except (OSError, EOFError):
            os._exit(1)
        try:
            answer = pickle.loads(content)  # noqa: S301 - from the parent
        except Exception as error:
            # What cannot be created here is the asker's error; this thread goes on.
            answer = None, error
        _answers.put(answer)


# Messages to the parent, and its answers


def send_to_parent(message: Any) -> None:
    """Send an object from the function of a worker to the parent, besides the report; do nothing in other processes.

    Args:
        message: Anything that can be pickled but a log record and a report. `WorkerProcess.messages` receives it.
    """
    for send in _senders:
        send(message)


class Question(NamedTuple):
    """A function that a worker lets its parent call.

    Attributes:
        function: The function, without arguments.
    """

    function: Callable[[], Any]

    def answer(self) -> bytes:
        """Return what the function returns, and None; or None, and its error; pickled.

        A `WorkerError` stands for what cannot be pickled.
        """
        value, error = None, None
        try:
            value = self.function()
        except Exception as raised:
            error = raised
        try:
            content = pickle.dumps((value, error))
            # Not all that is pickled can be created again.
            pickle.loads(content)  # noqa: S301 - from the line above
        except Exception as failure:
            reason = f"The parent's answer cannot be sent: {_in_words(failure)}"
            if error is not None:
                reason = f"The parent raised {_in_words(error)}"
            content = pickle.dumps((None, WorkerError(reason)))
        return content


def _in_words(error: Exception) -> str:
    return "".join(traceback.format_exception_only(error)).strip()


def call_in_parent(function: Callable[[], T]) -> T:
    """Call a function in the process that has started this worker, and return what it returns.

    A process that is no worker calls the function itself. One thread of a process may ask at a time.

    Args:
        function: A function without arguments that can be pickled, as can its result.

    Raises:
        Exception: The error of the function.
        WorkerError: In the place of an error, or of a result, that cannot be pickled.

    Example:
        >>> import os
        >>> call_in_parent(os.getpid) == os.getpid()
        True
    """
    if not _senders:
        return function()
    send_to_parent(Question(function))
    value, error = _answers.get()
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]
