"""A process continues while a thread that computes for it uses the processor, or while it waits for another process.

Each loop ends as soon as what it waits for is so, and never where that is wrong.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from torch.distributed import HashStore

from equipoise.extensions.pipeline.messaging import heartbeat
from equipoise.extensions.pipeline.messaging.heartbeat import Progress


@contextmanager
def running(work: Callable[[threading.Event], object], name: str | None = None) -> Iterator[threading.Thread]:
    """A thread that works until an event is set."""
    ended = threading.Event()
    thread = threading.Thread(target=work, args=(ended,), name=name)
    thread.start()
    try:
        yield thread
    finally:
        ended.set()
        thread.join()


def compute(ended: threading.Event) -> None:
    while not ended.is_set():
        sum(range(1000))


@pytest.fixture
def idle() -> Iterator[threading.Thread]:
    """A thread that waits."""
    with running(threading.Event.wait) as thread:
        yield thread


def test_a_thread_that_waits_does_not_go_on(idle: threading.Thread) -> None:
    progress = Progress(idle, lambda: False)
    # The thread may still be on its way to where it waits.
    while progress.has_gone_on():
        pass


def test_waiting_for_another_process_is_going_on(idle: threading.Thread) -> None:
    progress = Progress(idle, lambda: True)
    assert all(progress.has_gone_on() for _ in range(100))


def test_a_step_in_a_thread_of_its_own_goes_on(idle: threading.Thread) -> None:
    progress = Progress(idle, lambda: False)
    with running(compute, "equipoise-micro-batch"):
        for _ in range(3):
            while not progress.has_gone_on():
                pass


def test_other_threads_do_not_count(idle: threading.Thread) -> None:
    progress = Progress(idle, lambda: False)
    with running(compute, "a writer of logs"):
        while progress.has_gone_on():
            pass


def test_beats_come_as_long_as_the_run_goes_on() -> None:
    store = HashStore()
    with heartbeat.sending(store, 0.01, lambda: False):
        while int(store.get("beats")) < 4:
            pass
    last = store.get("beats")
    assert not [thread for thread in threading.enumerate() if thread.name == "heartbeat"]
    assert store.get("beats") == last


def test_a_process_that_hears_no_beat_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    aborted = threading.Event()
    monkeypatch.setattr(heartbeat, "_abort", lambda timeout: aborted.set())
    store = HashStore()
    with heartbeat.sending(store, 120.0, lambda: False), heartbeat.heard(store, 0.01):
        assert aborted.wait(120)
