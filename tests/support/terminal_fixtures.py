"""Terminals and files to draw on, a clock to draw by, and surroundings that are left as they were."""

import io
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import rich
import torch
from rich.console import Console

from equipoise.callbacks.progress import progress_bar
from tests.support.callback_runs import Clock
from tests.support.surroundings import threads_that_stay
from tests.support.terminal import Terminal

_ENVIRONMENT = ("NO_COLOR", "FORCE_COLOR", "TTY_INTERACTIVE", "TTY_COMPATIBLE", "COLUMNS", "LINES", "JUPYTER_COLUMNS")


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """One thread, a quiet Lightning, a folder of one's own; no thread, signal handler or stream is left changed."""
    for name in _ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.chdir(tmp_path)
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels, torch_threads = [logger.level for logger in loggers], torch.get_num_threads()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    handler, threads, streams = signal.getsignal(signal.SIGINT), set(threading.enumerate()), (sys.stdout, sys.stderr)
    yield
    changed_streams = (sys.stdout, sys.stderr) != streams
    signal.signal(signal.SIGINT, handler)
    torch.set_num_threads(torch_threads)
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    assert not changed_streams
    assert not threads_that_stay(threads, daemons=True)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress_bar, "monotonic", clock)
    return clock


@pytest.fixture
def make_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Terminal]:
    """Makes a terminal of a given width the one rich draws on."""

    def make(width: int) -> Terminal:
        terminal = Terminal(width)
        console = Console(
            file=terminal, force_terminal=True, width=width, height=50, color_system="256", legacy_windows=False
        )
        monkeypatch.setattr(rich, "get_console", lambda: console)
        return terminal

    return make


@pytest.fixture
def terminal(make_terminal: Callable[[int], Terminal]) -> Terminal:
    return make_terminal(100)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """A file for rich to write to."""
    file = io.StringIO()
    console = Console(file=file, width=80)
    monkeypatch.setattr(rich, "get_console", lambda: console)
    return file
