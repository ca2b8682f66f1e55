"""The fixtures of the commands' tests."""

import pytest

from equipoise.extensions.common import bench
from tests.support.bounded_calls import call_here
from tests.support.commands import equipoise, no_trace, project, quick

__all__ = ["equipoise", "no_trace", "project", "quick", "without_processes"]


@pytest.fixture
def without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials run in the process of the test."""
    monkeypatch.setattr(bench, "call_bounded", call_here)
