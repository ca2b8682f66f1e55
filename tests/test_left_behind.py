"""The guard of every test: it waits for what is about to end, names what stays, and puts back what was changed."""

import logging
import os
import threading
import weakref
from pathlib import Path

import lightning_utilities.core.rank_zero as rank_zero_module
import pytest
import torch

from equipoise.interop.torch.dispatch import OperationWatch
from tests.support import surroundings
from tests.support.surroundings import Surroundings, threads_that_stay


class Queue:
    """Holds a thread that ends when this object is collected; it refers to itself, so only a collection does that."""

    def __init__(self) -> None:
        self.closed, self.itself = threading.Event(), self
        weakref.finalize(self, self.closed.set)
        threading.Thread(target=self.closed.wait, daemon=True).start()


def test_a_thread_that_ends_with_garbage_is_waited_for() -> None:
    known = threading.enumerate()
    Queue()
    assert not threads_that_stay(known, daemons=True)


def test_a_thread_that_stays_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surroundings, "_PATIENCE", 0.0)
    known, event = threading.enumerate(), threading.Event()
    thread = threading.Thread(target=event.wait, daemon=True)
    thread.start()
    try:
        assert not threads_that_stay(known)
        assert threads_that_stay(known, daemons=True) == [thread]
    finally:
        event.set()
        thread.join()


def test_what_was_changed_is_named_and_put_back(tmp_path: Path) -> None:
    logger, messages = logging.getLogger("lightning.pytorch"), rank_zero_module.log
    level, threads = logger.level, torch.get_num_threads()
    before = Surroundings()
    logger.setLevel(logging.CRITICAL)
    rank_zero_module.log = logging.getLogger("another")
    torch.set_num_threads(threads + 1)
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir(tmp_path)
    complaints = " ".join(before.complaints())
    before.restore()
    for part in ("levels of loggers", "messages go to the logger another", "number of threads", "LEFT_BEHIND"):
        assert part in complaints
    assert "the current directory" in complaints
    assert (logger.level, rank_zero_module.log, torch.get_num_threads()) == (level, messages, threads)
    assert not list(before.complaints())


def test_a_watch_that_was_not_stopped_is_named_and_stopped() -> None:
    before = Surroundings()
    watch = OperationWatch(lambda name, result, arguments: None)
    watch.start()
    assert "1 watches of operations have not been stopped" in " ".join(before.complaints())
    before.restore()
    assert not list(before.complaints())
