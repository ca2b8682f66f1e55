"""Checks of the files in the archives."""

import re
import tarfile
import zipfile
from collections.abc import Iterable, Set
from pathlib import Path

__all__ = ["sdist_faults", "wheel_faults"]

# What runs, tests and tools leave behind.
_LEFTOVER = re.compile(r"(^|/)(__pycache__|\.\w+_cache|\.hypothesis|\.venv|\.git|outputs|multirun|_build)/|\.py[co]$")
_PACKAGES = ("equipoise/", "hydra_plugins/")
# The starter project lies in the wheel as a part of the package, with its own tests.
_STARTER = {"examples/digits/": "equipoise/starter/"}


def sdist_faults(sdist: Path, version: str, repository: Set[str]) -> list[str]:
    """Return what is wrong with the files of an sdist, which has all files of the repository and nothing else.

    Args:
        sdist: The archive.
        version: The version of the package.
        repository: The files of the repository.
    """
    top = f"equipoise-{version}/"
    with tarfile.open(sdist) as archive:
        members = {member.name for member in archive.getmembers() if not member.isdir()}
    faults = [f"{sdist.name}: {name} is outside of {top}" for name in sorted(members) if not name.startswith(top)]
    names = {name.removeprefix(top) for name in members}
    faults += _differences(sdist.name, names - {"PKG-INFO"}, repository)
    return faults + _leftovers(sdist.name, names)


def wheel_faults(wheel: Path, repository: Set[str]) -> list[str]:
    """Return what is wrong with the files of a wheel, which has the packages and the starter project, and no tests.

    Args:
        wheel: The archive.
        repository: The files of the repository.
    """
    expected = {name for name in repository if name.startswith(_PACKAGES)}
    for source, place in _STARTER.items():
        expected |= {place + name.removeprefix(source) for name in repository if name.startswith(source)}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    information = {name for name in names if ".dist-info/" in name}
    faults = _differences(wheel.name, names - information, expected)
    for wanted in ("METADATA", "RECORD", "entry_points.txt", "licenses/LICENSE"):
        if not any(name.endswith(f".dist-info/{wanted}") for name in information):
            faults.append(f"{wheel.name}: {wanted} is missing")
    return faults + _leftovers(wheel.name, names)


def _differences(archive: str, names: Set[str], expected: Set[str]) -> list[str]:
    missing = [f"{archive}: {name} is missing" for name in sorted(expected - names)]
    return missing + [f"{archive}: {name} should not be in it" for name in sorted(names - expected)]


def _leftovers(archive: str, names: Iterable[str]) -> list[str]:
    return [f"{archive}: {name} is left over from a run" for name in sorted(names) if _LEFTOVER.search(name)]
