"""Heartbeat of the main process; the other processes end when it stops.

The main process of a pipeline decides what happens next, and the other processes wait for its commands without a
limit: a validation may last for hours. So no timeout of an exchange reveals that the main process hangs. A thread of
the main process sends a beat whenever the run has made progress, and a thread of each other process waits for beats.

The run makes progress while a thread that computes for it uses the processor, or while it waits for a value of another
process, which has a limit already. So a step may take any time, and a loader that polls for its next batch may wait
for any time. A call that sleeps or waits for `timeout` seconds on end, and uses no processor time, is a hang.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Progress", "await_end", "heard", "sending"]

# Number of beats within a timeout.
_BEATS = 8
# Prefix of the names of threads in which steps and stages run.
_COMPUTING = "equipoise-"
# Value of an ordinary beat.
_GOES_ON = 1
# Value of the last beat.
_LAST = 0
# Seconds that the last beat has to arrive. A process that it does not reach has ended, or hangs.
_LEAVING = 10.0


class Progress:
    """Observes the processor time of a run's threads.

    Args:
        thread: Thread in which the run continues, beside those of its steps and stages.
        waits: Returns True while the run waits for another process.
    """

    def __init__(self, thread: threading.Thread, waits: Callable[[], bool]) -> None:
        self._thread = thread
        self._waits = waits
        # By the identity of a thread, in seconds.
        self._processor_times: dict[int, float] = {}

    def has_gone_on(self) -> bool:
        """Return True if a computing thread has used the processor since the last call, or if the run waits."""
        before = self._processor_times
        self._processor_times = {}
        for thread in threading.enumerate():
            if self._computes(thread):
                self._processor_times[id(thread)] = _processor_time(thread)
        return self._waits() or self._processor_times != before

    def _computes(self, thread: threading.Thread) -> bool:
        return thread is self._thread or thread.name.startswith(_COMPUTING)


def _processor_time(thread: threading.Thread) -> float:
    """Return the processor time of a thread in seconds; that of the process if the system measures no threads."""
    if thread.ident is None or not hasattr(time, "pthread_getcpuclockid"):
        return time.process_time()
    try:
        clock = time.pthread_getcpuclockid(thread.ident)
        return time.clock_gettime(clock)
    except OSError:
        # The thread has ended.
        return 0.0


@contextlib.contextmanager
def sending(group: dist.ProcessGroup, count: int, timeout: float, waits: Callable[[], bool]) -> Iterator[None]:
    """Send beats to the other processes during a block.

    Args:
        group: Process group that only the heartbeat uses.
        count: Number of processes in the group; this one is rank 0.
        timeout: Seconds after which the other processes count this one as hung.
        waits: Returns True while this process waits for another.
    """
    ended = threading.Event()
    caller = threading.current_thread()

    def run(rank: int) -> None:
        progress = Progress(caller, waits)
        # An error means that the other process has ended, which is reported elsewhere.
        with contextlib.suppress(RuntimeError):
            while not ended.wait(timeout / _BEATS):
                if progress.has_gone_on():
                    _send_beat(_GOES_ON, rank, group)
            _send_beat(_LAST, rank, group)

    # One thread for each process: a send returns when the receiver takes the beat, and the receiver may hang.
    threads = []
    for rank in range(1, count):
        thread = threading.Thread(target=run, args=(rank,), name="heartbeat", daemon=True)
        threads.append(thread)
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join(_LEAVING)


@contextlib.contextmanager
def heard(group: dist.ProcessGroup, timeout: float) -> Iterator[None]:
    """Wait for beats of the main process during a block; abort this process when none arrives.

    Args:
        group: Process group that only the heartbeat uses, with the same timeout.
        timeout: Seconds to wait for a beat.
    """

    def run() -> None:
        value = torch.ones(1, dtype=torch.int64)
        try:
            while int(value) != _LAST:
                _receive_beat(value, group)
        except RuntimeError as error:
            if "timed out" in str(error).lower():
                _abort(timeout)

    thread = threading.Thread(target=run, name="heartbeat", daemon=True)
    thread.start()
    yield
    thread.join()


def await_end(group: dist.ProcessGroup, seconds: float) -> None:
    """Wait until the main process has ended, which closes its connections; called after the last beat.

    Args:
        group: Process group that only the heartbeat uses.
        seconds: Longest time to wait: the main process may handle its error and continue.
    """

    def run() -> None:
        # Nothing more is sent, so only the end of the main process ends this.
        with contextlib.suppress(RuntimeError):
            _receive_beat(torch.ones(1, dtype=torch.int64), group)

    thread = threading.Thread(target=run, name="heartbeat", daemon=True)
    thread.start()
    thread.join(seconds)


def _send_beat(value: int, rank: int, group: dist.ProcessGroup) -> None:
    """Send a beat, and wait until the receiver takes it."""
    # `send` knows only groups within the default group.
    work = dist.isend(torch.tensor([value]), group=group, group_dst=rank)
    assert work is not None
    work.wait()


def _receive_beat(value: Tensor, group: dist.ProcessGroup) -> None:
    """Wait for a beat of the main process, and write it into a tensor."""
    work = dist.irecv(value, group=group, group_src=0)
    assert work is not None
    work.wait()


def _abort(timeout: float) -> None:
    """Abort this process, which only a command of the main process could end otherwise.

    The parent takes SIGABRT for a consequence of another failure.
    """
    print(
        f"The first process of the pipeline has made no progress for {timeout:g} seconds and counts as hung;"
        " this one ends.",
        file=sys.stderr,
        flush=True,
    )
    os.kill(os.getpid(), signal.SIGABRT)
