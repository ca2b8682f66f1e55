"""Folders with runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.extensions.runs.run_files import CONFIGURATION, WriteRun, content


@pytest.fixture
def write_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteRun:
    """Return a function that writes a folder of a run, below the working folder."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, lr: Any = 0.1, **given: Any) -> Path:
        folder = tmp_path / "outputs" / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(CONFIGURATION.format(folder=folder, lr=lr))
        (folder / "run.json").write_text(json.dumps(content(**given)))
        return folder

    return write
