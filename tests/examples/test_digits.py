"""The main job: `equipoise fit` where nothing else is configured."""

import csv
import re

import pytest
import torch
import yaml


def rows(folder):
    """Return what the module logged; readings of memory have rows of their own."""
    others = ("epoch", "step", "memory/")
    with (folder / "metrics.csv").open() as file:
        return [row for row in csv.DictReader(file) if any(row[name] for name in row if not name.startswith(others))]


@pytest.mark.slow
def test_the_main_job(empty_folder, equipoise):
    code, out, _ = equipoise("fit", "trainer.enable_progress_bar=false")
    assert code == 0

    # At least 97% of images that neither training nor the choice of a checkpoint has seen.
    (run,) = (path.parent for path in empty_folder.glob("outputs/*/*/config.yaml"))
    accuracy = float(rows(run)[-1]["test_accuracy"])
    assert accuracy >= 0.97

    # A closing table, and everything that is worth keeping in one folder.
    for line in ("val_accuracy", "samples per second", "time per epoch", "peak memory"):
        assert line in out
    assert re.search(r"test_accuracy\D+0\.9", out)
    assert yaml.safe_load((run / "config.yaml").read_text())["trainer"]["max_epochs"] == 20
    assert (run / "report.html").exists()
    assert (run / "checkpoints" / "last.ckpt").exists()
    assert len([row for row in rows(run) if row["val_accuracy"]]) == 20

    # The same once more, from the best checkpoint.
    assert equipoise("test", "experiment=digits", "ckpt_path=best")[0] == 0
    again = max(path.parent for path in empty_folder.glob("outputs/*/*/config.yaml"))
    assert float(rows(again)[-1]["test_accuracy"]) == pytest.approx(accuracy, abs=1e-6)


@pytest.mark.thorough
def test_predictions_are_digits(empty_folder, equipoise):
    assert equipoise("predict")[0] == 0
    (path,) = empty_folder.glob("outputs/*/*/predictions.pt")
    digits = torch.cat(torch.load(path, weights_only=True))
    assert digits.shape == (360,)
    assert set(digits.tolist()) <= set(range(10))
