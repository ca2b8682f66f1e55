"""A process continues while a thread that computes for it uses the processor, or while it waits for another process.

Each loop ends as soon as what it waits for is so, and never where that is wrong.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from torch.distributed import DistNetworkError, HashStore, TCPStore

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
    assert not heartbeat_threads()
    assert store.get("beats") == last


@pytest.fixture
def aborted(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set in the place of an abort."""
    event = threading.Event()
    monkeypatch.setattr(heartbeat, "_abort", lambda timeout: event.set())
    return event


def test_a_process_that_hears_no_beat_is_aborted(aborted: threading.Event) -> None:
    store = HashStore()
    with heartbeat.sending(store, 120.0, lambda: False), heartbeat.heard(store, 0.01):
        assert aborted.wait(120)


SERVER = """
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
store.add("beats", 1)
print(store.port, flush=True)
input()
"""


@contextmanager
def served_store() -> Iterator[tuple[subprocess.Popen[str], TCPStore]]:
    """A process that serves a store, and the store."""
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            yield process, TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=1))
        finally:
            process.kill()


def heartbeat_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "heartbeat"]


def test_a_store_that_gives_no_answer_is_a_main_process_that_hangs(aborted: threading.Event) -> None:
    with served_store() as (process, store):
        with heartbeat.heard(store, 1.0):
            os.kill(process.pid, signal.SIGSTOP)
            assert aborted.wait(60)
        # Without answer a thread waits on, but it aborts nothing.
        aborted.clear()
        os.kill(process.pid, signal.SIGCONT)
        for thread in heartbeat_threads():
            thread.join(60)
        assert not heartbeat_threads()
        assert not aborted.is_set()


def test_a_main_process_that_ended_is_reported_elsewhere(aborted: threading.Event) -> None:
    with served_store() as (process, store), heartbeat.heard(store, 8.0):
        threads = heartbeat_threads()
        process.kill()
        for thread in threads:
            thread.join(120)
        assert not heartbeat_threads()
        assert not aborted.is_set()


class Unreachable(HashStore):
    """Its TCP connection gave up."""

    def add(self, key: str, amount: int) -> int:
        raise DistNetworkError("Connection timed out")


def test_a_connection_that_gave_up_is_a_main_process_that_hangs(aborted: threading.Event) -> None:
    with heartbeat.heard(Unreachable(), 0.01):
        assert aborted.wait(60)
