"""Heartbeat of the main process; the other processes end when it stops.

The main process of a pipeline decides what happens next, and the other processes wait for its commands without a
limit: a validation may last for hours. So no timeout of an exchange reveals that the main process hangs. A thread of
the main process counts a beat in a store whenever the run has made progress, and a thread of each other process looks
whether the count grows.

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

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["Progress", "heard", "sending"]

# Key of the count of beats.
_BEATS = "beats"
# Number of looks at it within a timeout.
_CHECKS = 8
# Prefix of the names of threads in which steps and stages run.
_COMPUTING = "equipoise-"
# Seconds that a thread has to end: the process that serves the store may hang.
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
def sending(store: Store, timeout: float, waits: Callable[[], bool]) -> Iterator[None]:
    """Count beats in a store during a block, which the other processes read.

    Args:
        store: Store of the processes, in which nothing else is.
        timeout: Seconds after which the other processes count this one as hung.
        waits: Returns True while this process waits for another.
    """
    progress = Progress(threading.current_thread(), waits)

    def beat() -> None:
        if progress.has_gone_on():
            store.add(_BEATS, 1)

    store.add(_BEATS, 1)
    with _repeated(beat, timeout / _CHECKS):
        yield


@contextlib.contextmanager
def heard(store: Store, timeout: float) -> Iterator[None]:
    """Look for beats of the main process during a block; abort this process when none comes.

    Args:
        store: The store in which the main process counts its beats.
        timeout: Seconds to wait for a beat.
    """
    beats = b""
    checks_since = 0

    def check() -> None:
        nonlocal beats, checks_since
        checks_since += 1
        try:
            present = store.get(_BEATS)
        except dist.DistStoreError:
            # No answer for so long: what serves the store is in the process that hangs.
            present = beats
            checks_since = _CHECKS
        if present != beats:
            beats = present
            checks_since = 0
        elif checks_since >= _CHECKS:
            _abort(timeout)

    with _repeated(check, timeout / _CHECKS):
        yield


@contextlib.contextmanager
def _repeated(function: Callable[[], None], seconds: float) -> Iterator[None]:
    """Call a function again and again during a block, in a thread."""
    ended = threading.Event()

    def run() -> None:
        # An error means that the process which serves the store has ended, which is reported elsewhere.
        with contextlib.suppress(RuntimeError):
            while not ended.wait(seconds):
                function()

    thread = threading.Thread(target=run, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_LEAVING)


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
