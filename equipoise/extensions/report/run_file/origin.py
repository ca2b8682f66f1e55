"""Read what is run: the command, versions, the commit of the working folder, and the process."""

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import lightning
import psutil
import torch

import equipoise
from equipoise.extensions.report.page.record import ReportSection

__all__ = ["origin_section", "read_origin"]

# What stands before the commit in the output of git.
_COMMIT = "# branch.oid "
# A large repository must not hold up a run.
_MOST_SECONDS = 2.0


def read_origin() -> dict[str, Any]:
    """Return the command, the working folder, versions, commit and process of this program, as values of JSON."""
    folder = str(Path.cwd())
    commit, is_changed = _read_commit(folder)
    return {
        "command": _command(),
        "folder": folder,
        "versions": _versions(),
        "commit": commit,
        "changed": is_changed,
        "host": platform.node(),
        "process": os.getpid(),
        # Numbers of processes are used again.
        "process_began": psutil.Process().create_time(),
    }


def _command() -> str:
    arguments = list(sys.argv)
    # Hydra takes no stage among its arguments. Only fits ask for this.
    if arguments[:1] == ["equipoise"]:
        arguments.insert(1, "fit")
    return shlex.join(arguments)


@cache
def _versions() -> Mapping[str, str]:
    versions = {
        "python": platform.python_version(),
        "equipoise": equipoise.__version__,
        "torch": str(torch.__version__),
        "lightning": lightning.__version__,
    }
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    return versions


def _read_commit(folder: str) -> tuple[str | None, bool | None]:
    """Return the commit of a folder, and whether files that git follows differ from it; None outside of a repository.

    Git is asked once, without locks, and without programs that the repository's own settings name.
    """
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "status"]
    options = ["--porcelain=v2", "--branch", "--untracked-files=no", "--ignore-submodules"]
    try:
        done = subprocess.run([*command, *options], cwd=folder, capture_output=True, timeout=_MOST_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None, None
    lines = done.stdout.decode(errors="replace").splitlines()
    commit = None
    is_changed = False
    for line in lines:
        # Lines without this sign are changed files.
        if not line.startswith("#"):
            is_changed = True
        elif line.startswith(_COMMIT):
            commit = line.removeprefix(_COMMIT)
    if commit is None or commit == "(initial)":
        return None, None
    return commit, is_changed


def origin_section(origin: Mapping[str, Any]) -> ReportSection:
    """Return the section of the report that says what was run."""
    # 1. The commit, where there is one.
    commit = "none"
    if origin["commit"]:
        commit = f"{origin['commit']}, without changes"
    if origin["changed"]:
        commit = f"{origin['commit']}, with changes that are not committed"

    # 2. The table.
    rows = [
        ("Fact", "Value"),
        ("command", origin["command"]),
        ("folder", origin["folder"]),
        ("commit", commit),
        ("versions", ", ".join(f"{name} {number}" for name, number in origin["versions"].items())),
        ("machine", origin["host"]),
    ]
    return ReportSection("What was run", table=rows)
