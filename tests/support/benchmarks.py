"""The scripts of a benchmark, imported for a test and gone again afterwards."""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch

__all__ = ["BENCHMARKS", "Modules", "Scripts", "scripts"]

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LOGGERS = ("lightning.pytorch", "lightning.fabric", "lightning", "equipoise")  # which they silence

Modules = dict[str, ModuleType]
Scripts = Callable[..., Modules]


@contextmanager
def _loaded(folder: str, *names: str) -> Iterator[dict[str, ModuleType]]:
    threads, loggers = torch.get_num_threads(), [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    path = [str(BENCHMARKS / folder), *sys.path]
    try:
        with mock.patch.dict(os.environ), mock.patch.object(sys, "path", path):
            yield {name: import_module(name) for name in names}
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        # Also where one of them cannot be imported: another folder has scripts of the same names.
        for name in names:
            sys.modules.pop(name, None)
        torch.set_num_threads(threads)


@pytest.fixture
def scripts() -> Iterator[Scripts]:
    """`scripts(folder, *names)` imports scripts of a benchmark and returns them by name."""
    with ExitStack() as stack:
        yield lambda folder, *names: stack.enter_context(_loaded(folder, *names))
