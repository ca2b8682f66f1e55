"""Packages of this environment, beside the versions that the tests ran with."""

from collections.abc import Mapping
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from equipoise.interop import versions

__all__ = ["MISSING", "NEWER", "OLDER", "Package", "list_packages"]

# Needed by every run, and older than any question of versions.
_REQUIRED = ("cloudpickle", "packaging", "psutil")

_OPTIONAL: Mapping[str, str] = {
    "tensorboard": "logger=tensorboard",
    "transformers": "models of transformers",
    "ray": "runs and sweeps under Ray",
    "accelerate": "benchmarks/overhead",
    "scikit-learn": "the digits example",
    "jsonargparse": "CLITrainer",
}
"""Packages that some users need, and what for."""

# Values of `Package.status` that others look for.
MISSING = "missing"
NEWER = "newer than tested"
OLDER = "older than tested"


@dataclass(frozen=True, kw_only=True)
class Package:
    """Package, or Python.

    Attributes:
        name: Its name as pip knows it, or "python".
        version: Its version; None if it is not installed.
        status: "tested", "newer than tested", "older than tested", "installed" (versions are not compared), "missing",
            or "not installed" (it is optional).
        remark: The status as a phrase, with the tested versions or a remedy.
    """

    name: str
    version: str | None
    status: str
    remark: str


def list_packages() -> list[Package]:
    """List Python, the required packages and the optional ones.

    Example:
        >>> list_packages()[0].name
        'python'
    """
    packages = []
    for name, tested in versions.TESTED.items():
        packages.append(_compared(name, tested, is_newer=versions.is_newer_than_tested(name)))
    for name in _REQUIRED:
        packages.append(_present_or_not(name, MISSING, f"missing: pip install {name}"))
    for name, use in _OPTIONAL.items():
        packages.append(_present_or_not(name, "not installed", f"not installed (needed for {use})"))
    return packages


def _compared(name: str, tested: tuple[str, str], *, is_newer: bool) -> Package:
    """Return a package whose version is compared with the tested ones."""
    oldest, newest = tested
    version = versions.installed_version(name)
    if version is None:
        remark = f"missing: pip install '{name}>={oldest},<={newest}'"
        return Package(name=name, version=None, status=MISSING, remark=remark)
    status = "tested"
    if is_newer:
        status = NEWER
    elif _is_older(version, oldest):
        status = OLDER
    remark = f"{status} {oldest} to {newest}"
    if status != "tested":
        remark = f"{status} ({oldest} to {newest})"
    return Package(name=name, version=version, status=status, remark=remark)


def _is_older(version: str, oldest: str) -> bool:
    try:
        return Version(version.rstrip("+")) < Version(oldest)
    except InvalidVersion:
        # A user's own build, with a version that cannot be compared.
        return False


def _present_or_not(name: str, status_without: str, remark_without: str) -> Package:
    """Return a package whose version is not compared."""
    version = versions.installed_version(name)
    if version is None:
        return Package(name=name, version=None, status=status_without, remark=remark_without)
    return Package(name=name, version=version, status="installed", remark="installed")
