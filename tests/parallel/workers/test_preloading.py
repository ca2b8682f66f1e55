"""Modules that the server of workers imports; `test_launch` looks for them in a worker."""

import pytest

from equipoise.parallel.workers import preloading
from equipoise.parallel.workers.preloading import preload, preloaded_modules


def test_modules_are_registered_once_after_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preloading, "_registered", [])
    preload("json", "csv")
    preload("csv", "math")
    assert preloaded_modules()[-3:] == ["json", "csv", "math"]
    assert preloaded_modules()[1] == "torch"
