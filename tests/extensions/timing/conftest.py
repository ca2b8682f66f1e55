"""The clock of the tests."""

import pytest

from equipoise.extensions.timing import clock as clock_module
from tests.support.callback_runs import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(clock_module, "perf_counter", clock)
    return clock
