"""A process goes on while a thread that computes for it uses the processor, or while it waits for another process.

Each loop ends as soon as what it waits for is so, and never where that is wrong.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from equipoise.parallel.communication import heartbeat
from equipoise.parallel.communication.heartbeat import Progress


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
    while progress.has_gone_on():
        pass
    assert not progress.has_gone_on()


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
        assert not progress.has_gone_on()


def test_beats_come_as_long_as_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[tuple[int, int]] = []

    def send(content: torch.Tensor, rank: int, group: Any) -> None:
        beats.append((rank, int(content)))

    monkeypatch.setattr(heartbeat.dist, "send", send)
    group: Any = None
    with heartbeat.sending(group, 3, 0.01, lambda: False):
        while not all(beats.count((rank, 1)) >= 3 for rank in (1, 2)):
            pass
    assert [beat for rank, beat in beats if rank == 1][-1] == 0
    assert [beat for rank, beat in beats if rank == 2][-1] == 0
