"""A trial of the wheel: installed into an empty environment, it makes a project and trains it."""

import os
import subprocess
import venv
from collections.abc import Sequence
from pathlib import Path

from scripts.checks.sources import ROOT

__all__ = ["trial_faults"]


class _CommandFailed(Exception):
    """A command has failed; the message holds the end of its output."""


def trial_faults(wheel: Path, version: str, folder: Path) -> list[str]:
    """Install a wheel with the versions of constraints.txt, and use it as its first user does.

    Args:
        wheel: The archive.
        version: The version of the package.
        folder: An empty folder for the environment and the project.

    Returns:
        The first command that failed, or nothing.
    """
    programs = folder / "environment" / "bin"
    project = folder / "project"
    try:
        venv.create(programs.parent, with_pip=True)
        pip = [str(programs / "python"), "-m", "pip"]
        # The project of `equipoise init` needs what the examples need.
        constraints = ["--constraint", str(ROOT / "constraints.txt")]
        _run([*pip, "install", "--quiet", *constraints, f"equipoise[examples] @ {wheel.as_uri()}"], folder)
        _run([*pip, "check"], folder)
        shown = _run([str(programs / "equipoise"), "--version"], folder)
        if shown.split() != ["equipoise", version]:
            return [f"trial: equipoise --version prints {shown!r}"]
        _run([str(programs / "equipoise"), "init", project.name], folder)
        _run([str(programs / "equipoise"), "fit", "trainer.max_epochs=1"], project)
    except _CommandFailed as error:
        return [f"trial: {error}"]
    if not list(project.glob("outputs/*/*/report.html")):
        return ["trial: the training has written no report"]
    return []


def _run(command: Sequence[str], folder: Path) -> str:
    """Run a command outside of the checkout, and return what it prints.

    Raises:
        _CommandFailed: If it fails.
    """
    print(f"$ {' '.join([Path(command[0]).name, *command[1:]])}", flush=True)
    # Without the variables of a developer, such as PYTHONPATH.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "EQUIPOISE"))}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        end = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise _CommandFailed(f"{' '.join(command)} exited with {done.returncode}:\n{end}")
    return done.stdout
