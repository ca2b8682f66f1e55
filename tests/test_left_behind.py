"""The guard of every test: it waits for what is about to end, names what stays, and puts back what was changed."""

import logging
import os
import threading
from pathlib import Path

import lightning_utilities.core.rank_zero as rank_zero_module
import pytest
import torch

from tests.support import surroundings
from tests.support.surroundings import Surroundings, threads_that_stay


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
