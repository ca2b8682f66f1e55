"""What a page may change, and finds as it was on the next page."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks.pages import ROOT

__all__ = ["page_folder"]


@pytest.fixture
def page_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder in which the process stands and from which it imports, with an environment of its own."""
    environment = os.environ.copy()
    # Other tests have a project of this name as well.
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_project"]:
        monkeypatch.delitem(sys.modules, name)
    modules = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path
    os.environ.clear()
    os.environ.update(environment)
    for name in set(sys.modules) - modules:
        if is_of_a_project(sys.modules[name], tmp_path):
            del sys.modules[name]


def is_of_a_project(module: object, folder: Path) -> bool:
    """Return whether a module is of a page's own project or of an example."""
    file = getattr(module, "__file__", None)
    if file is None:
        return False
    return Path(file).is_relative_to(folder) or Path(file).is_relative_to(ROOT / "examples")
