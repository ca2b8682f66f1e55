"""The command of tests/app, standing in an empty folder."""

from pathlib import Path

import pytest

from tests.support.commands import equipoise, no_trace

__all__ = ["equipoise", "no_trace"]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path
