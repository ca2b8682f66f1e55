"""The files of a run's folder."""

from contextlib import suppress
from pathlib import Path

import pytest

from equipoise.app.output import begun_folder

CONFIG = {"stage": "fit", "ckpt_path": None, "value": 1}


def test_metrics_of_earlier_runs_are_put_aside_in_their_order(tmp_path: Path) -> None:
    for text in ("first", "second"):
        (tmp_path / "metrics.csv").write_text(text)
        with begun_folder(tmp_path, CONFIG):
            pass
    assert [(tmp_path / f"metrics_{i}.csv").read_text() for i in (0, 1)] == ["first", "second"]
    assert not (tmp_path / "metrics.csv").exists()


@pytest.mark.parametrize("name", ["metrics.csv", "run.json", "checkpoints"])
def test_a_run_that_has_begun_stays(tmp_path: Path, name: str) -> None:
    with suppress(ValueError), begun_folder(tmp_path, CONFIG):
        (tmp_path / name).touch()
        raise ValueError
    assert "value: 1" in (tmp_path / "config.yaml").read_text()
