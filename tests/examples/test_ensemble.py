"""The ensemble from the command line, and a student that learns from its checkpoint."""

import csv
from pathlib import Path

import pytest

CONF = Path(__file__).parents[2] / "examples" / "ensemble" / "conf"
QUIET = ("trainer.enable_progress_bar=false", "~callbacks.memory_logger")


def last_row(folder):
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))[-1]


@pytest.mark.slow
def test_together_they_are_better(equipoise, tmp_path, monkeypatch):
    monkeypatch.chdir(CONF.parent)
    code, out, err = equipoise("fit", *QUIET, f"hydra.run.dir={tmp_path / 'run'}")
    assert code == 0, err
    assert "mean_probabilities" in out
    values = last_row(tmp_path / "run")
    for measure, sign in [("test_accuracy", 1), ("test_calibration_error", -1)]:
        of_members = [float(values[f"{measure}/member_{index}"]) for index in range(8)]
        assert sign * float(values[f"{measure}/mean_probabilities"]) > sign * sum(of_members) / 8
    assert (tmp_path / "run" / "members.svg").exists()


@pytest.mark.slow
@pytest.mark.whole_package
def test_student(equipoise, tmp_path):
    command = ("fit", "--config-dir", str(CONF), *QUIET)
    code, _, err = equipoise(
        *(*command, "strategy.members=2", "trainer.max_epochs=5", f"hydra.run.dir={tmp_path / 'ensemble'}")
    )
    assert code == 0, err
    teacher = tmp_path / "ensemble" / "checkpoints" / "last.ckpt"
    code, _, err = equipoise(
        *(*command, "experiment=student", f"module.teacher={teacher}", "module.channels=4", "trainer.max_epochs=10"),
        f"hydra.run.dir={tmp_path / 'student'}",
    )
    assert code == 0, err
    assert float(last_row(tmp_path / "student")["test_accuracy"]) > 0.5
    # The members are read from a folder of their own, which is gone.
    assert [path.name for path in teacher.parent.iterdir()] == ["last.ckpt"]
