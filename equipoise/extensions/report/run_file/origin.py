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
from equipoise.formats import format_path
from equipoise.interop.remote.paths import AnyPath

__all__ = ["origin_facts", "read_origin"]

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
        "overrides": _overrides(),
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


def _overrides() -> list[str]:
    """Return the overrides of the command line, in a sweep those of the job; none in a program without Hydra."""
    hydra = sys.modules.get("hydra.core.hydra_config")
    if hydra is None or not hydra.HydraConfig.initialized():
        return []
    return [str(override) for override in hydra.HydraConfig.get().overrides.task]


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


def origin_facts(origin: Mapping[str, Any], folder: AnyPath) -> dict[str, str]:
    """Return what the report says first: which run it is, and what was run.

    Args:
        origin: As `read_origin` returns it.
        folder: The folder of the run.
    """
    commit = ""
    if origin["commit"]:
        commit = f"{origin['commit']}, without changes"
    if origin["changed"]:
        commit = f"{origin['commit']}, with changes that are not committed"
    facts = {
        "run": format_path(str(folder)),
        "overrides": shlex.join(origin["overrides"]),
        "command": origin["command"],
        "commit": commit,
        "folder": origin["folder"],
        "versions": ", ".join(f"{name} {number}" for name, number in origin["versions"].items()),
        "machine": origin["host"],
    }
    return {name: text for name, text in facts.items() if text}
