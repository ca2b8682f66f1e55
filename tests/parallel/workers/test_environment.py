"""Workers show the warnings that their parent would show, in its words."""

import os
import re
import threading
import warnings
from collections.abc import Iterator

import pytest

from equipoise.parallel.workers.environment import ProcessEnvironment
from equipoise.parallel.workers.launch import launch


class OfTheScript(UserWarning):
    """A category that a worker learns of with the filter."""


def short(message: Warning | str, category: type[Warning], *_: object) -> str:
    return f"{category.__name__}: {message}"


@pytest.fixture(autouse=True)
def filters() -> Iterator[None]:
    form = warnings.formatwarning
    with warnings.catch_warnings():
        yield
    warnings.formatwarning = form


def shown(rank: int) -> list[str]:
    """Return the results of five warnings: an error, nothing, or the text."""
    found = []
    for message, category in [
        ("a folder exists", UserWarning),
        ("a folder is new", UserWarning),
        ("of the script", OfTheScript),
        ("old", DeprecationWarning),
        ("old [1]", FutureWarning),
    ]:
        with warnings.catch_warnings(record=True) as seen:
            try:
                warnings.warn_explicit(message, category, "script.py", 7, module="script")
            except Warning:
                found.append("error")
                continue
        told = [warnings.formatwarning(each.message, each.category, "script.py", 7, None) for each in seen]
        found.append(told[0] if told else "nothing")
    return found


def test_warning_filters_reach_the_workers() -> None:
    warnings.resetwarnings()
    warnings.filterwarnings("ignore", "a folder .* exists|a folder exists")
    warnings.filterwarnings("error", category=OfTheScript)
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="script", lineno=7)
    warnings.filterwarnings("ignore", category=FutureWarning, module="another")
    warnings.formatwarning = short
    expected = ["nothing", "UserWarning: a folder is new", "error", "nothing", "FutureWarning: old [1]"]
    assert shown(0) == expected
    assert launch(shown, 1) == expected


class Service:
    """Starts as it is pickled, and says in a variable how it is reached, as the service of Weights & Biases does."""

    def __getstate__(self) -> dict[str, str]:
        os.environ["ADDRESS_OF_SERVICE"] = "there"
        return {}

    def __call__(self, rank: int) -> str | None:
        return os.environ.get("ADDRESS_OF_SERVICE")


def test_variables_of_what_is_sent_reach_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADDRESS_OF_SERVICE", "nowhere")
    assert launch(Service(), 1) == "there"


def test_a_filter_of_plain_text_matches_that_text_alone() -> None:
    """Python's own filters name `__main__` that way."""
    warnings.resetwarnings()
    plain = ("error", None, DeprecationWarning, "script.py", 0)
    warnings.filters.insert(0, plain)
    around = ProcessEnvironment()
    assert [
        re.compile(each.module).match(name) is None
        for each in around.warning_filters
        for name in ("script.py", "scriptopy", "script.pyc")
    ] == [False, True, True]


def test_what_cannot_be_sent_stays_behind() -> None:
    lock = threading.Lock()

    def unsendable(*_: object) -> str:
        return str(lock)

    warnings.formatwarning = unsendable
    assert ProcessEnvironment().warning_format is None
