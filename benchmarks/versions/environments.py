"""Environments of exact versions, one beside the other, built by uv: it links files that environments share."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from uv import find_uv_bin

from benchmarks.versions.rows import Row

__all__ = ["NotAvailable", "NotBuildable", "build", "install", "python_of"]

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
PROJECT = ROOT / "pyproject.toml"
# Packages that belong to one version of torch.
OF_TORCH = ("triton", "nvidia-", "cuda-", "setuptools")
# Seconds that a download of several gigabytes may take.
SECONDS = 1800.0


# Parts of uv's messages where nothing answers, or this machine has no such Python.
NO_ANSWER = ("error sending request", "dns error", "timed out", "connect", "No interpreter found", "Failed to download")


class NotAvailable(Exception):
    """Nothing answers, or this machine lacks what the environment needs; the message gives the reason."""


class NotBuildable(Exception):
    """The versions of a row do not go together, or the package does not build; the message gives the reason."""


def python_of(folder: Path) -> Path:
    """Return the interpreter of an environment."""
    return folder / "bin" / "python"


def build(row: Row, folder: Path) -> None:
    """Build the environment of a row; do nothing if the same one exists.

    Args:
        row: The row.
        folder: The folder of the environment. A different one there is removed.

    Raises:
        NotAvailable: If Python or a package of it cannot be had, or the time is up.
        NotBuildable: If uv fails otherwise.
    """
    # 1. An environment is kept while what it was built from is the same, and no version is left open.
    wanted = _wanted(row)
    key = wanted + PROJECT.read_text()
    done = folder / "built_from.txt"
    if row.is_constrained and done.is_file() and done.read_text() == key:
        return

    # 2. Build it.
    install(row, folder, ["--editable", f"{ROOT}[dev,docs]"])
    done.write_text(key)


def install(row: Row, folder: Path, requirements: Sequence[str]) -> None:
    """Make an environment with the versions of a row, and install into it.

    Args:
        row: The row.
        folder: The folder of the environment. One that is there is removed.
        requirements: What to install, as arguments of `uv pip install`.

    Raises:
        NotAvailable: If Python or a package of it cannot be had, or the time is up.
        NotBuildable: If uv fails otherwise.
    """
    shutil.rmtree(folder, ignore_errors=True)
    _uv(["venv", "--seed", "--python", row.python, str(folder)], row.python)
    constraints = folder / "constraints.txt"
    constraints.write_text(_wanted(row))
    target = ["--python", str(python_of(folder)), "--constraint", str(constraints)]
    _uv(["pip", "install", *target, *requirements], row.python)


def _wanted(row: Row) -> str:
    """Return the constraints of a row, one exact version a line."""
    lines = [f"{package}=={version}" for package, version in row.packages.items()]
    if row.is_constrained:
        lines += [line for line in CONSTRAINTS.read_text().splitlines() if _counts(line, row)]
    return "\n".join(lines) + "\n"


def _counts(line: str, row: Row) -> bool:
    """Return True for a constraint of a package that a row does not choose itself."""
    package = line.partition("==")[0].lower()
    return bool(package) and package not in row.packages and not package.startswith(("#", *OF_TORCH))


def _uv(arguments: Sequence[str], python: str) -> None:
    """Run uv, without a machine's own constraints: a row names the versions.

    Args:
        arguments: Its arguments.
        python: Version of Python, which pyenv's commands answer for.

    Raises:
        NotAvailable: If nothing answers.
        NotBuildable: If it fails otherwise.
    """
    variables = {**os.environ, "UV_HTTP_TIMEOUT": "120", "UV_NO_CONFIG": "1", "PYENV_VERSION": python}
    command = [find_uv_bin(), "--quiet", *arguments]
    try:
        ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise NotAvailable(f"uv did not finish in {SECONDS / 60:.0f} minutes") from None
    if ended.returncode:
        reason = " ".join(ended.stderr.split())[:400]
        if any(part in reason for part in NO_ANSWER):
            raise NotAvailable(reason)
        raise NotBuildable(reason)
