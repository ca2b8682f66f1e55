"""The examples in docstrings do what they say."""

import doctest
import importlib
import re

import pytest

from tests.support.sources import FILES, module_name

MODULES = [module_name(path) for path in FILES if re.search(r">>> (?!.*\+SKIP)", path.read_text(encoding="utf-8"))]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_do_what_they_say(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.attempted
    assert results.failed == 0
