"""Heartbeat of the main process; the other processes end when it stops.

The first process of a pipeline decides what happens next, and others wait for its commands as long as it takes: a
validation may last for hours. So a hang there shows in nothing that is due. A thread of the first process sends a beat
whenever the run has gone on, and a thread of each other process waits for beats.

The run goes on while a thread that computes for it uses the processor, or while it waits for a value of another
process, for which there is a limit already. So a step may take any time, and a loader that asks for its next batch
again and again may wait for any time; a call that sleeps or waits for `timeout` seconds on end, and uses nothing, is
a hang.
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

__all__ = ["Progress", "heard", "sending"]

_BEATS = 8  # within a timeout
_COMPUTING = "equipoise-"  # how names of threads begin in which steps and stages run
_GOES_ON, _LAST = 1, 0  # a beat, and the one after which no other comes
_LEAVING = 10.0  # seconds that the last beat has to arrive; a process that it does not reach is gone, or hangs


class Progress:
    """Notices whether a process goes on.

    Args:
        thread: Thread in which the run goes on, beside those of its steps and stages.
        waits: Returns whether it waits for another process.
    """

    def __init__(self, thread: threading.Thread, waits: Callable[[], bool]) -> None:
        self._thread, self._waits = thread, waits
        self._used: dict[int, float] = {}

    def has_gone_on(self) -> bool:
        """Return whether a computing thread has used the processor since this was asked last, or waits."""
        before = self._used
        self._used = {id(thread): _seconds(thread) for thread in threading.enumerate() if self._computes(thread)}
        return self._waits() or self._used != before

    def _computes(self, thread: threading.Thread) -> bool:
        return thread is self._thread or thread.name.startswith(_COMPUTING)


def _seconds(thread: threading.Thread) -> float:
    """Return the seconds of the processor that a thread has used; those of the process where no system tells."""
    if thread.ident is None or not hasattr(time, "pthread_getcpuclockid"):
        return time.process_time()
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    except OSError:  # it has ended
        return 0.0


@contextlib.contextmanager
def sending(group: dist.ProcessGroup, count: int, timeout: float, waits: Callable[[], bool]) -> Iterator[None]:
    """Send beats to the other processes while something is done.

    Args:
        group: A process group for nothing else.
        count: Number of its processes, of which this is the first.
        timeout: Seconds after which the others count this process as hung.
        waits: Returns whether this process waits for another.
    """
    ended, caller = threading.Event(), threading.current_thread()

    def run(rank: int) -> None:
        progress = Progress(caller, waits)
        with contextlib.suppress(RuntimeError):  # the other process has ended, which shows elsewhere
            while not ended.wait(timeout / _BEATS):
                if progress.has_gone_on():
                    dist.send(torch.tensor([_GOES_ON]), rank, group=group)
            dist.send(torch.tensor([_LAST]), rank, group=group)

    # One for each process, since a beat leaves when the other side takes it, and that may itself hang.
    threads = [threading.Thread(target=run, args=(rank,), name="heartbeat", daemon=True) for rank in range(1, count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join(_LEAVING)


@contextlib.contextmanager
def heard(group: dist.ProcessGroup, timeout: float) -> Iterator[None]:
    """Wait for beats of the first process while something is done; abort this process when none comes.

    Args:
        group: A process group for nothing else, which waits for `timeout`.
        timeout: Seconds for which a beat is waited for.
    """

    def run() -> None:
        value = torch.ones(1, dtype=torch.int64)
        try:
            while int(value) != _LAST:
                dist.recv(value, 0, group=group)
        except RuntimeError as error:
            if "timed out" in str(error).lower():
                _abort(timeout)

    thread = threading.Thread(target=run, name="heartbeat", daemon=True)
    thread.start()
    yield
    thread.join()


def _abort(timeout: float) -> None:
    """End this process, which nothing but the first one's command could end, by the signal that others know."""
    print(
        f"The first process of the pipeline has not gone on for {timeout:g} seconds and counts as hung; this one ends.",
        file=sys.stderr,
        flush=True,
    )
    os.kill(os.getpid(), signal.SIGABRT)
