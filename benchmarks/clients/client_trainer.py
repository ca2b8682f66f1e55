"""A pytest plugin that runs a library's tests with another Trainer, and records each test.

The environment variable CLIENT_TRAINER chooses "lightning", which changes nothing, or "equipoise", which exchanges the
class `Trainer` in the modules of Lightning before the library is imported. CLIENT_RECORD names the file of the record.
It holds one JSON object a line: the test, its outcome, and whether it ran a Trainer.
"""

import contextlib
import importlib
import json
import os
from collections.abc import Generator
from typing import Any

import pytest

EXCHANGED_IN = (
    "lightning",
    "lightning.pytorch",
    "lightning.pytorch.trainer",
    "lightning.pytorch.trainer.trainer",
    "pytorch_lightning",
    "pytorch_lightning.trainer",
    "pytorch_lightning.trainer.trainer",
)
ENTRIES = ("fit", "validate", "test", "predict")

_runs: list[str] = []


def _exchange(trainer: type) -> None:
    """Put a Trainer in the place of Lightning's."""
    for name in EXCHANGED_IN:
        importlib.import_module(name).Trainer = trainer  # type: ignore[attr-defined]


def _record_runs(trainer: type) -> None:
    """Note each call of an entry point of a Trainer."""
    for entry in ENTRIES:
        usual = getattr(trainer, entry)

        def noted(self: Any, *args: Any, _usual: Any = usual, _entry: str = entry, **kwargs: Any) -> Any:
            _runs.append(_entry)
            return _usual(self, *args, **kwargs)

        setattr(trainer, entry, noted)


def _run_unchanged_modules() -> None:
    """Run the tests that scikit-base would skip because their module is as on the main branch of its repository."""
    with contextlib.suppress(ImportError):
        changes: Any = importlib.import_module("skbase.utils.git_diff")
        changes._is_module_changed = lambda module: True


def pytest_configure(config: pytest.Config) -> None:
    """Exchange the Trainer before tests, and the library with them, are imported."""
    import lightning
    import pytorch_lightning

    _run_unchanged_modules()
    if os.environ["CLIENT_TRAINER"] == "equipoise":
        import equipoise

        _exchange(equipoise.Trainer)
        _record_runs(equipoise.Trainer)
    else:
        _record_runs(lightning.Trainer)
        _record_runs(pytorch_lightning.Trainer)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, None]:
    """Count the runs of one test, its fixtures included."""
    _runs.clear()
    yield


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    """Write a line for each phase that failed, and for each call."""
    result: Any = yield
    report = result.get_result()
    if report.when != "call" and report.outcome == "passed":
        return
    line = {
        "test": item.nodeid,
        "phase": report.when,
        "outcome": report.outcome,
        "ran": bool(_runs),
        "error": str(report.longrepr)[-600:] if report.outcome == "failed" else "",
    }
    with open(os.environ["CLIENT_RECORD"], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, Any, Any]:
    """Let a test that interrupts its own run fail alone: our Trainer raises the KeyboardInterrupt again."""
    try:
        return (yield)
    except KeyboardInterrupt as interrupt:
        raise AssertionError("KeyboardInterrupt") from interrupt
