"""Quiet loggers, and generators left as they were: a parity run changes nothing for the tests after it."""

import logging
import os
import signal
from collections.abc import Iterator

import pytest
import torch
from lightning.pytorch.utilities.seed import isolate_rng

QUIET = ("lightning.pytorch", "lightning.fabric", "lightning", "equipoise")


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    deterministic = torch.are_deterministic_algorithms_enabled()
    interrupt = signal.getsignal(signal.SIGINT)
    levels = {name: logging.getLogger(name).level for name in QUIET}
    monkeypatch.setattr(os, "fsync", lambda file: None)  # what a power cut would leave is tested elsewhere
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)
    with isolate_rng():
        yield
    signal.signal(signal.SIGINT, interrupt)  # Lightning ignores interrupts after the first one
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    torch.use_deterministic_algorithms(deterministic)
