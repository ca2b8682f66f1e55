"""Versions of Python and of other packages that the tests ran with, and a notice about newer ones."""

import platform
from collections.abc import Mapping
from functools import cache
from importlib import metadata

from packaging.version import InvalidVersion, Version

from equipoise.notices import rank_zero_warn

__all__ = [
    "TESTED",
    "installed_version",
    "is_newer_than_tested",
    "newer_than_tested",
    "warn_of_untested_versions",
]

TESTED: Mapping[str, tuple[str, str]] = {
    "python": ("3.11", "3.13"),
    "torch": ("2.11.0", "2.15.0"),
    "lightning": ("2.6.0", "2.6.6"),
    "torchmetrics": ("1.5.0", "1.9.0"),
    "hydra-core": ("1.3.2", "1.3.8"),
    "omegaconf": ("2.3.0", "2.3.1"),
    "numpy": ("1.26.0", "2.4.6"),
    "rich": ("14.1.0", "15.0.0"),
}
"""The oldest and the newest version of each package that all quick tests passed with."""


def installed_version(package: str) -> str | None:
    """Return the version of a package, or of Python; None if the package is not installed.

    Args:
        package: The package's name as pip knows it, or "python".
    """
    if package == "python":
        return platform.python_version()
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def newer_than_tested() -> list[str]:
    """Return one phrase for each package that is newer than the versions in `TESTED`.

    A later patch of a tested Python, or another build of the same version, does not count as newer.

    Example:
        >>> newer_than_tested()
        []
    """
    phrases = []
    for package, (oldest, newest) in TESTED.items():
        if is_newer_than_tested(package):
            phrases.append(f"{package} {installed_version(package)} (tested: {oldest} to {newest})")
    return phrases


def is_newer_than_tested(package: str) -> bool:
    """Return True if the installed version of a package is newer than the newest one in `TESTED`.

    Args:
        package: A key of `TESTED`.
    """
    _, newest = TESTED[package]
    version = installed_version(package)
    return version is not None and _is_newer(version, newest)


def _is_newer(version: str, newest: str) -> bool:
    """Return True if a version is newer than the newest one, compared to as many places as that has."""
    try:
        # Some builds of Python end with a plus.
        parsed = Version(version.rstrip("+"))
    except InvalidVersion:
        # A user's own build, with a version that cannot be compared.
        return False
    bound = Version(newest)
    places = len(bound.release)
    return parsed.release[:places] > bound.release


@cache
def warn_of_untested_versions() -> None:
    """Warn once in a process, before the first run, of packages that are newer than what was tested."""
    newer = newer_than_tested()
    if newer:
        rank_zero_warn(
            f"Newer than the versions that Equipoise was tested with: {', '.join(newer)}. If a run fails,"
            " `equipoise doctor` shows which features were checked."
        )
