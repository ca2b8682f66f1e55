"""A process continues while a thread that computes for it uses the processor, or while it waits for another process.

Each loop ends as soon as what it waits for is so, and never where that is wrong.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from equipoise.extensions.pipeline.messaging import heartbeat
from equipoise.extensions.pipeline.messaging.heartbeat import Progress, await_end
from equipoise.parallel.communication.process_group import StoreServer, another_group, joined
from equipoise.parallel.communication.rank import Rank
from equipoise.parallel.workers.preloading import preloading

PATIENCE = timedelta(seconds=120)


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


def test_beats_come_as_long_as_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[tuple[int, int]] = []

    def isend(content: torch.Tensor, *, group: Any, group_dst: int) -> Any:
        beats.append((group_dst, int(content)))
        return Mock()

    monkeypatch.setattr(heartbeat.dist, "isend", isend)
    group: Any = None
    with heartbeat.sending(group, 3, 0.01, lambda: False):
        while not all(beats.count((rank, 1)) >= 3 for rank in (1, 2)):
            pass
    assert [beat for rank, beat in beats if rank == 1][-1] == 0
    assert [beat for rank, beat in beats if rank == 2][-1] == 0


# The end of the main process


def end_when_asked(place: Rank, port: int, pipe: Connection) -> None:
    """Be the main process: end, connections and all, once the test says so."""
    with joined(place, torch.device("cpu"), timeout=PATIENCE, port=port), another_group(PATIENCE, local=True):
        assert pipe.recv() == "end"
        raise SystemExit


def wait_for_the_end(place: Rank, port: int, pipe: Connection) -> None:
    """Be another process: report before and after the wait."""
    with joined(place, torch.device("cpu"), timeout=PATIENCE, port=port), another_group(PATIENCE, local=True) as group:
        pipe.send("waits")
        await_end(group, PATIENCE.total_seconds())
        pipe.send("continues")
        dist.destroy_process_group()
        raise SystemExit


def test_a_process_can_wait_until_the_main_process_has_ended() -> None:
    context = get_context("forkserver")
    pipes = []
    processes = []
    with StoreServer() as store, preloading():
        for rank, role in enumerate((end_when_asked, wait_for_the_end)):
            here, there = context.Pipe()
            process = context.Process(target=role, args=(Rank(rank, rank, 0, 2, 2), store.port, there))
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        main, other = pipes
        assert other.recv() == "waits"
        assert not other.poll(0.5)
        main.send("end")
        assert other.recv() == "continues"
        for process in processes:
            process.join()
            assert process.exitcode == 0
            process.close()
        for pipe in pipes:
            pipe.close()
