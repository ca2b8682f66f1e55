"""Trials of the archives in empty environments: a project that is trained, and each group of extras alone."""

import os
import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path

from benchmarks.versions.environments import NotAvailable, NotBuildable, install, python_of
from benchmarks.versions.rows import Row, rows_named
from scripts.checks.sources import ROOT

__all__ = ["extra_faults", "extras", "trial_faults"]

# The oldest and the newest torch.
_OLDEST, _NEWEST = rows_named(["py3.11-torch2.11.0", "py3.13-torch2.15.0"])


class _CommandFailed(Exception):
    """A command has failed; the message holds the end of its output."""


def trial_faults(archive: Path, version: str, folder: Path, *, newest: bool) -> list[str]:
    """Install an archive into an empty environment, and use it as its first user does: make a project and train it.

    Args:
        archive: The sdist or the wheel.
        version: The version of the package.
        folder: An empty folder for the environment and the project.
        newest: Whether to take the newest torch; else the oldest.

    Returns:
        The first command that failed, or nothing.
    """
    project = folder / "project"
    try:
        # The project of `equipoise init` needs what the examples need.
        command = _installed(_NEWEST if newest else _OLDEST, archive, "examples", folder)
        shown = _run([command, "--version"], folder)
        if shown.split() != ["equipoise", version]:
            return [f"trial of {archive.name}: equipoise --version prints {shown!r}"]
        _run([command, "init", project.name], folder)
        _run([command, "fit", "trainer.max_epochs=1"], project)
    except (_CommandFailed, NotAvailable, NotBuildable) as error:
        return [f"trial of {archive.name}: {error}"]
    if not list(project.glob("outputs/*/*/report.html")):
        return [f"trial of {archive.name}: the training has written no report"]
    return []


def extras() -> list[str]:
    """Return the names of the groups of extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return list(project["optional-dependencies"])


def extra_faults(wheel: Path, name: str, folder: Path) -> list[str]:
    """Install a group of extras alone, and ask the command for a diagnosis.

    Args:
        wheel: The archive.
        name: The group.
        folder: An empty folder for the environment.

    Returns:
        The first command that failed, or nothing.
    """
    try:
        _run([_installed(_NEWEST, wheel, name, folder), "doctor"], folder)
    except (_CommandFailed, NotAvailable, NotBuildable) as error:
        return [f"extras {name}: {error}"]
    return []


def _installed(row: Row, archive: Path, extra: str, folder: Path) -> str:
    """Install an archive with a group of extras into an environment of its own, and return its command."""
    environment = folder / "environment"
    print(f"{archive.name}[{extra}] with torch {row.packages['torch']}", flush=True)
    install(row, environment, [f"equipoise[{extra}] @ {archive.as_uri()}"])
    _run([str(python_of(environment)), "-m", "pip", "check"], folder)
    return str(environment / "bin" / "equipoise")


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
