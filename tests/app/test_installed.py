"""An installed wheel, outside a checkout, contains its starter project."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The contents of a wheel, unpacked as an installer would."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "--wheel-dir", str(folder), str(ROOT)], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def run_in(folder: Path, site: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "equipoise", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_holds_configurations_and_the_starter_project_and_no_leftovers(site):
    files = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    assert {"equipoise/extensions/common/page/page.css", "equipoise/extensions/common/page/page.js"} <= files
    assert {"equipoise/conf/equipoise.yaml", "equipoise/conf/logger/csv.yaml", "equipoise/py.typed"} <= files
    assert "hydra_plugins/equipoise_launcher.py" in files
    starter = {path.removeprefix("equipoise/starter/") for path in files if path.startswith("equipoise/starter/")}
    assert {"conf/config.yaml", "conf/experiment/digits.yaml", "digits/module.py", "tests/test_digits.py"} <= starter
    assert not any(name.startswith(("tests/", "examples/", "benchmarks/")) for name in files)
    folders = {folder for name in files for folder in name.split("/")[:-1]}
    assert not folders & {"__pycache__", "outputs", "multirun"}
    assert not any(name.endswith(".pyc") for name in files)


def test_a_starter_project_from_a_wheel_trains_at_once(site, tmp_path):
    (site / "equipoise" / "starter" / "from_the_wheel").touch()
    run_in(tmp_path, site, "init", "mine")
    assert (tmp_path / "mine" / "from_the_wheel").exists()
    out = run_in(tmp_path / "mine", site, "fit", "trainer.max_epochs=1", "trainer.enable_progress_bar=false")
    assert "test_accuracy" in out
    (run,) = (path.parent for path in (tmp_path / "mine" / "outputs").glob("*/*/config.yaml"))
    assert {"config.yaml", "metrics.csv", "checkpoints", "report.html"} <= {path.name for path in run.iterdir()}
