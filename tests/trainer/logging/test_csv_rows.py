"""Rows of `metrics.csv` that are written again, since a column is new."""

import csv
import os
import warnings
from pathlib import Path
from typing import Any

import fsspec
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from equipoise.trainer.logging import csv_rows
from tests.support.trainer_runs import Small, loader, trainer


class Growing(Small):
    """Logs one more value in its second epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.current_epoch == 1:
            self.log("later", 1.0)
        return super().training_step(batch, batch_idx)


def fit(folder: Path | str, ckpt_path: str | None = None, **options: Any) -> None:
    logger = CSVLogger(folder, name="", version="", flush_logs_every_n_steps=1)
    run = trainer(logger=logger, max_epochs=2, log_every_n_steps=1, **options)
    run.fit(Growing(), loader(), ckpt_path=ckpt_path)


def column(name: str, place: Path | str) -> list[str]:
    """The values of a column of `metrics.csv`."""
    with fsspec.open(str(place), "r", newline="") as file:
        return [row[name] for row in csv.DictReader(file)]


def assert_complete(place: Path | str) -> None:
    """Each step has one row, and those of the second epoch one more value."""
    assert column("step", place) == ["0", "1", "2", "3", "4", "5"]
    assert column("later", place) == ["", "", "", "1.0", "1.0", "1.0"]
    assert all(column("loss", place))


def test_a_file_with_a_new_column_replaces_the_old_one_atomically(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a process that is killed meanwhile loses none."""
    steps = []
    replace = os.replace

    def watched(source: str, target: Path) -> None:
        steps.extend(column("step", path) for path in (target, source))
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    fit(tmp_path)
    assert steps == [["0", "1", "2"]] * 2
    assert_complete(tmp_path / "metrics.csv")
    assert not list(tmp_path.glob("*.part"))


def test_rows_keep_their_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's logger writes in the default encoding, which on Windows is not UTF-8."""
    monkeypatch.setattr(csv_rows, "_ENCODING", "cp1252")
    path = tmp_path / "metrics.csv"
    path.write_bytes("größe,step\r\n1.5,7\r\n".encode("cp1252"))
    csv_rows._rewrite(path, ["größe", "step", "später"])
    assert path.read_bytes().decode("cp1252") == "größe,step,später\r\n1.5,7,\r\n"
    assert csv_rows._step_of(path.read_bytes().splitlines(keepends=True), 1) == "7"


def test_a_run_that_is_resumed_elsewhere_has_every_row_once(memory_files: Any) -> None:
    """Nothing looks for a file on this machine's disk; rows behind the checkpoint are written again."""
    address = "memory://rows"
    keeper = ModelCheckpoint(f"{address}/kept", filename="{epoch}", save_top_k=-1)
    for ckpt_path in (None, f"{address}/kept/epoch=0.ckpt"):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Experiment logs directory")
            fit(address, ckpt_path, callbacks=[keeper], enable_checkpointing=True)
        assert_complete(f"{address}/metrics.csv")
