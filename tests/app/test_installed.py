"""An installed wheel, outside a checkout, contains its starter project."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(folder: Path, *arguments: str, path: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_starter_project_from_a_wheel_trains_at_once(tmp_path):
    run(tmp_path, "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", str(ROOT), path=ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "equipoise" / "starter" / "from_the_wheel").touch()

    run(tmp_path, "equipoise", "init", "mine", path=site)
    assert (tmp_path / "mine" / "from_the_wheel").exists()
    training = ("fit", "trainer.max_epochs=1", "trainer.enable_progress_bar=false")
    out = run(tmp_path / "mine", "equipoise", *training, path=site)
    assert "test_accuracy" in out
    (folder,) = (path.parent for path in (tmp_path / "mine" / "outputs").glob("*/*/config.yaml"))
    assert {"config.yaml", "metrics.csv", "checkpoints", "report.html"} <= {path.name for path in folder.iterdir()}
