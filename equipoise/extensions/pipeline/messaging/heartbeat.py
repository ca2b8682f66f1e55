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

from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["Progress", "heard", "sending"]

# Key of the count of beats.
_BEATS = "beats"
# Number of looks at it within a timeout.
_CHECKS = 8
# Prefix of the names of threads in which steps and stages run.
_COMPUTING = "equipoise-"
# Seconds that a thread has to end: the process that serves the store may hang.
_LEAVING = 2.0
# What errors say where TCP gave up: the store's process, or its machine, gave no answer. It may hang.
_UNREACHABLE = ("timed out", "no route to host")


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
    with _repeated(beat, timeout / _CHECKS, threading.Event()):
        yield


@contextlib.contextmanager
def heard(store: Store, timeout: float) -> Iterator[None]:
    """Look for beats of the main process during a block; abort this process when none comes.

    Args:
        store: The store in which the main process counts its beats.
        timeout: Seconds to wait for a beat.
    """
    ended = threading.Event()
    # Of these, each thread writes its own.
    beats = 0
    seen = 0
    looks_since = 0

    def read() -> None:
        nonlocal beats
        try:
            # This does not wait for a first beat, as `get` would.
            beats = store.add(_BEATS, 0)
        except RuntimeError as error:
            # Otherwise what serves the store has ended, so no beat can come.
            if not any(sign in str(error).lower() for sign in _UNREACHABLE):
                ended.set()
            raise

    def look() -> None:
        nonlocal seen, looks_since
        looks_since += 1
        if beats != seen:
            seen = beats
            looks_since = 0
        elif looks_since >= _CHECKS:
            _abort(timeout)

    # No answer for so long: what serves the store is in the process that hangs. Then `read` does not return, as the
    # store has no limit for its answers, so another thread looks.
    with _repeated(read, timeout / _CHECKS, ended), _repeated(look, timeout / _CHECKS, ended):
        yield


@contextlib.contextmanager
def _repeated(function: Callable[[], None], seconds: float, ended: threading.Event) -> Iterator[None]:
    """Call a function again and again during a block, in a thread, until the event is set."""

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
