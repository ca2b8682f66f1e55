"""The files of a run's folder."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from equipoise.app.output import begun_folder


def run(folder: Path, value: int, body: Callable[[], Any] = lambda: None, stage: str = "fit") -> None:
    with suppress(ValueError), begun_folder(folder, {"stage": stage, "ckpt_path": None, "value": value}):
        body()


def refuse() -> None:
    raise ValueError


def files(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_metrics_of_an_earlier_run_are_put_aside(tmp_path: Path) -> None:
    for text in ("first", "second"):
        (tmp_path / "metrics.csv").write_text(text)
        run(tmp_path, 1)
    assert [(tmp_path / f"metrics_{i}.csv").read_text() for i in (0, 1)] == ["first", "second"]
    assert not (tmp_path / "metrics.csv").exists()


def test_a_run_that_is_refused_leaves_none(tmp_path: Path) -> None:
    def refuse_after_hyperparameters() -> None:
        (tmp_path / "hparams.yaml").write_text("lr: 1")
        refuse()

    for body in (refuse, refuse_after_hyperparameters):
        run(tmp_path, 1, body)
        assert files(tmp_path) == {}


def test_a_run_that_is_refused_changes_nothing_of_an_earlier_one(tmp_path: Path) -> None:
    run(tmp_path, 1, (tmp_path / "metrics.csv").touch)
    before = files(tmp_path)
    run(tmp_path, 2, refuse)
    assert files(tmp_path) == before


@pytest.mark.parametrize("name", ["metrics.csv", "run.json", "checkpoints"])
def test_a_run_that_has_begun_stays(tmp_path: Path, name: str) -> None:
    def fail_later() -> None:
        (tmp_path / name).touch()
        refuse()

    run(tmp_path, 1, fail_later)
    assert "value: 1" in files(tmp_path)["config.yaml"]
