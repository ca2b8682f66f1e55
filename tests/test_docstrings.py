"""The examples in docstrings do what they say."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import equipoise

NAMES = sorted(info.name for info in pkgutil.walk_packages(equipoise.__path__, "equipoise."))
MODULES = [name for name in NAMES if ">>> " in inspect.getsource(importlib.import_module(name))]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_do_what_they_say(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.failed == 0


def test_examples_are_found() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [test for name in MODULES for test in finder.find(importlib.import_module(name)) if test.examples]
    assert len(found) > 50
