"""A worker process, as its parent sees it: start it, read its messages, end it."""

import contextlib
import logging
import os
import signal
import time
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any

from equipoise.parallel.workers.messages import log_forwarding
from equipoise.parallel.workers.messages.reports import Report
from equipoise.parallel.workers.worker_main import Question, Task, run_worker

__all__ = ["Task", "WorkerProcess"]

# Seconds in which a hung process begins to write its stack, also on a busy machine.
_FIRST_LINE = 10.0
# Seconds until the next line of a stack.
_NEXT_LINE = 0.2
# Seconds that a worker has to leave after its report.
_LEAVING = 3.0
# Further sentences of a message, by exit code.
_HINTS = {255: " The server that starts processes may have been ended, or cannot tell how the process ended."}


@dataclass
class WorkerProcess:
    """A worker process, as its parent sees it.

    Attributes:
        rank: Number of the worker, from 0.
        process: The process of multiprocessing.
        connection: Carries log records and the report of the worker.
        stack: Connection to which a process writes its stack when it hangs or aborts.
        report: Report of its end; None before.
        messages: Objects that its function has sent; see `send_to_parent`.
    """

    rank: int
    process: Any
    connection: Connection
    stack: Connection
    report: Report | None = None
    messages: list[Any] = field(default_factory=list)

    @classmethod
    def start(cls, context: Any, rank: int, task: Task) -> "WorkerProcess":
        """Start a worker.

        Args:
            context: Context of multiprocessing that starts it.
            rank: Its number, from 0.
            task: The task that all workers receive.
        """
        # 1. Connections, of which the worker receives the other ends.
        parent_end, worker_end = context.Pipe()
        stack_of_parent, stack_of_worker = context.Pipe(duplex=False)
        arguments = (rank, task, stack_of_worker, worker_end)
        process = context.Process(target=run_worker, args=arguments, name=f"rank {rank}")
        # 2. The worker's ends are closed here, so that the parent's report the end of the worker.
        try:
            process.start()
        finally:
            worker_end.close()
            stack_of_worker.close()
        return cls(rank, process, parent_end, stack_of_parent)

    def read(self) -> None:
        """Read a log record, the report, a question or an object. A closed connection becomes a report, too."""
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            self.report = self._report_of_exit(self.process.exitcode)
            return
        if isinstance(message, logging.LogRecord):
            log_forwarding.hand_on(message)
        elif isinstance(message, Report):
            self.report = message
        elif isinstance(message, Question):
            # A worker that was killed since then reads no answer.
            with contextlib.suppress(OSError):
                self.connection.send_bytes(message.answer())
        else:
            self.messages.append(message)

    def _report_of_exit(self, code: int) -> Report:
        """Return the report of a worker that has sent none; its code is negative for the signal that killed it."""
        now = time.monotonic()
        if code < 0:
            # A process that aborts has written its stack before its end.
            return Report(self.rank, now, text=self._written_stack(timeout=0), signal=-code)
        hint = _HINTS.get(code, "")
        return Report(self.rank, now, text=f"It left with exit code {code}.{hint}")

    def send_signal(self, number: int) -> None:
        """Send a signal to the worker, unless it has ended."""
        if self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def end(self) -> None:
        """Wait for a worker that is done; kill any other one. Processes that it has started are killed as well."""
        if self.report is not None and not self.report.failed:
            self.process.join(_LEAVING)
        # The worker leads a group of its own, to which its processes belong.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.send_signal(signal.SIGKILL)
        self.process.join()
        self.connection.close()
        self.stack.close()
        self.process.close()

    def where(self) -> str:
        """Return the present stack of the worker."""
        self.send_signal(signal.SIGUSR1)
        return self._written_stack(timeout=_FIRST_LINE) or "It does not answer."

    def _written_stack(self, timeout: float) -> str:
        """Return the stacks of the worker's threads that it writes; empty if the first line does not arrive in time."""
        stack = b""
        # The worker writes line by line.
        while connection.wait([self.stack], timeout):
            lines = os.read(self.stack.fileno(), 1 << 16)
            if not lines:
                break
            stack += lines
            timeout = _NEXT_LINE
        threads = stack.decode(errors="replace").split("\n\n")
        # One thread only waits for the end of the parent.
        return "\n\n".join(thread for thread in threads if "_end_with_parent" not in thread)
