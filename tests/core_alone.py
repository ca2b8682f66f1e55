"""Runs the tests of the core in a copy of this checkout from which the folder of every extension is deleted.

    python -m tests.core_alone [OPTIONS OF PYTEST]

Tests that ask for an extension are skipped there. Before them, the example trains for an epoch.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTENSIONS = (
    "equipoise/extensions",
    "tests/extensions",
    "examples/ensemble/tests",
    "examples/extension/tests",
    "examples/finetune_lora/tests",
    "examples/finetune_transformers/tests",
)
OPTIONS = ["-n", "2", "--dist", "worksteal", "-m", "not slow", "-q"]


def copy_core(folder: Path) -> None:
    """Copy the files of the checkout, tracked or new, without extensions and their tests."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        source = ROOT / name
        if name.startswith(EXTENSIONS) or not source.is_file():
            continue
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def main(options: list[str]) -> int:
    """Return the exit code of the tests."""
    with tempfile.TemporaryDirectory(prefix="core-alone-") as name:
        folder = Path(name)
        copy_core(folder)
        environment = {**os.environ, "PYTHONPATH": name}
        train = [sys.executable, "-m", "equipoise", "fit", "trainer.max_epochs=1"]
        subprocess.run(train, cwd=folder / "examples" / "digits", env=environment, check=True)
        tests = [sys.executable, "-m", "pytest", *(options or OPTIONS)]
        return subprocess.run(tests, cwd=folder, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
