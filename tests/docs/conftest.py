"""State that a page may change, restored for the next page."""

import logging
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.docs.blocks.pages import ROOT

__all__ = ["page_folder"]


@pytest.fixture
def page_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder in which the process stands and from which it imports, with an environment of its own."""
    environment = os.environ.copy()
    logger = logging.getLogger()
    handlers = logger.handlers.copy()
    level = logger.level
    # Other tests have a project of this name as well.
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_project"]:
        monkeypatch.delitem(sys.modules, name)
    modules = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path
    # Hydra sets handlers of its own, as in a process of its own.
    for handler in set(logger.handlers) - set(handlers):
        handler.close()
    logger.handlers[:] = handlers
    logger.setLevel(level)
    os.environ.clear()
    os.environ.update(environment)
    for name in set(sys.modules) - modules:
        if is_of_a_project(sys.modules[name], tmp_path):
            del sys.modules[name]


def is_of_a_project(module: object, folder: Path) -> bool:
    """Return whether a module is of a page's own project or of an example."""
    places = [getattr(module, "__file__", None)]
    # A package without `__init__.py` has folders and no file.
    path = getattr(module, "__path__", None)
    if isinstance(path, Iterable):
        places += path
    paths = [Path(place) for place in places if place is not None]
    return any(path.is_relative_to(parent) for path in paths for parent in (folder, ROOT / "examples"))
