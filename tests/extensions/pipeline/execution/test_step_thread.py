"""Ctrl-C while a step runs in its thread."""

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from equipoise.extensions.pipeline.execution.step_thread import StepThread
from equipoise.parallel.replicas.device_threads import ThreadState

SECONDS = 60


@pytest.fixture
def thread_of_steps() -> Iterator[StepThread]:
    thread = StepThread("steps")
    yield thread
    thread.close()
    assert thread.ident not in {other.ident for other in threading.enumerate()}


@pytest.mark.parametrize("calls_before", [0, 1])
@pytest.mark.parametrize("calls_after", [0, 1])
def test_a_step_that_was_interrupted_ends_at_its_next_call(
    thread_of_steps: StepThread, calls_before: int, calls_after: int
) -> None:
    interrupted = threading.Event()
    caller_knows = threading.Event()
    ends: list[str] = []

    def interrupt_once(*_: Any) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    def step() -> None:
        try:
            for _ in range(calls_before):
                thread_of_steps.pause("before")
            # Python misses a signal that comes right before the caller begins to wait.
            while not interrupted.wait(0.02):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            assert caller_knows.wait(SECONDS)
            for _ in range(calls_after):
                thread_of_steps.pause("after")
            ends.append("whole")
        finally:
            ends.append("left")

    def run() -> None:
        thread_of_steps.start(step, state)
        for _ in range(calls_before):
            thread_of_steps.resume(None)

    state = ThreadState.capture(("cpu",))
    handler = signal.signal(signal.SIGINT, interrupt_once)
    try:
        with pytest.raises(KeyboardInterrupt):
            run()
        caller_knows.set()
        thread_of_steps.abandon()
    finally:
        signal.signal(signal.SIGINT, handler)
    assert ends == (["left"] if calls_after else ["whole", "left"])
    assert thread_of_steps.call is None

    # The next step is not disturbed.
    thread_of_steps.start(lambda: thread_of_steps.pause("next"), state)
    assert thread_of_steps.call == "next"
    thread_of_steps.resume(3)
    assert thread_of_steps.take_result() == 3


def test_a_thread_ends_with_a_step_that_nobody_abandoned(thread_of_steps: StepThread) -> None:
    results: list[Any] = []
    thread_of_steps.start(lambda: results.append(thread_of_steps.pause("call")), ThreadState.capture(("cpu",)))
    assert thread_of_steps.call == "call"
    # The fixture closes it.
