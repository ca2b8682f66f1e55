"""Checks of the checkout: one version everywhere, and a section of the changelog for it."""

import re
import subprocess
import tomllib
from pathlib import Path

__all__ = ["ROOT", "changelog_faults", "changelog_notes", "repository_files", "version_faults", "version_of"]

ROOT = Path(__file__).resolve().parents[2]

_SECTION = re.compile(r"^## \[(?P<version>[^\]]+)\](?: - (?P<date>\S+))?$", flags=re.MULTILINE)
# The groups of Keep a Changelog.
_GROUPS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def version_of(root: Path) -> str:
    """Return `equipoise.__version__` without importing the package."""
    source = (root / "equipoise" / "__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"$', source, flags=re.MULTILINE)
    return str(version)


def version_faults(root: Path) -> list[str]:
    """Return the files that state another version than the package."""
    version = version_of(root)
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (cited,) = re.findall(r"^version: (.+)$", (root / "CITATION.cff").read_text(encoding="utf-8"), flags=re.MULTILINE)
    stated = {"pyproject.toml": project["version"], "CITATION.cff": cited}
    return [f"{name}: version {other}, not {version}" for name, other in stated.items() if other != version]


def changelog_faults(root: Path, version: str) -> list[str]:
    """Return what is wrong with the form of the changelog, or that a version has no section.

    Args:
        root: The checkout.
        version: The version.
    """
    text = _changelog(root)
    faults = []
    if version not in [section["version"] for section in _SECTION.finditer(text)]:
        faults.append(f"CHANGELOG.md: no section ## [{version}]")
    for heading in re.findall(r"^## .*$", text, flags=re.MULTILINE):
        if not _SECTION.match(heading):
            faults.append(f"CHANGELOG.md: {heading!r} is not of the form '## [VERSION] - DATE'")
    for group in re.findall(r"^### (.*)$", text, flags=re.MULTILINE):
        if group not in _GROUPS:
            faults.append(f"CHANGELOG.md: {group!r} is none of {', '.join(sorted(_GROUPS))}")
    return faults


def changelog_notes(root: Path, version: str) -> list[str]:
    """Return what the changelog lacks for a release of a version: its date, and that nothing else waits for one.

    Args:
        root: The checkout.
        version: The version.
    """
    text = _changelog(root)
    notes = []
    for section in _SECTION.finditer(text):
        date = section["date"] or ""
        if section["version"] == version and not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
            notes.append(f"CHANGELOG.md: the section of {version} has no date")
        if section["version"] == "Unreleased" and text[section.end() :].lstrip().startswith("###"):
            notes.append("CHANGELOG.md: there are entries under [Unreleased]")
    return notes


def repository_files(root: Path) -> set[str]:
    """Return the files that git tracks or would track, which leaves out what .gitignore names.

    Args:
        root: The checkout.
    """
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    return {name for name in listed.split("\0") if name and (root / name).exists()}


def _changelog(root: Path) -> str:
    return (root / "CHANGELOG.md").read_text(encoding="utf-8")
