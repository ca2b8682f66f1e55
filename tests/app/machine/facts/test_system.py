"""Limits, and systems without them."""

import resource
from pathlib import Path

import pytest

from equipoise.app.machine.facts import system
from equipoise.app.machine.facts.system import read_limits


def test_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, resource.RLIM_INFINITY))
    monkeypatch.setattr(system, "_SHARED_MEMORY", tmp_path)
    limits = read_limits()
    assert (limits["open_files"], limits["most_open_files"]) == (1024, None)
    assert limits["shared_memory"] is not None
    assert limits["free_shared_memory"] is not None
    assert limits["shared_memory"] >= limits["free_shared_memory"] > 0


def test_a_system_without_limits_and_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As Windows is."""
    monkeypatch.setattr(system, "resource", None)
    monkeypatch.setattr(system, "_SHARED_MEMORY", tmp_path / "shm")
    assert set(read_limits().values()) == {None}
