"""Checks of a wheel's metadata, and of the README as a package index shows it."""

import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token
from packaging.metadata import InvalidMetadata, Metadata

__all__ = ["metadata_faults", "readme_notes"]


def metadata_faults(wheel: Path, version: str) -> list[str]:
    """Return what is wrong with the metadata of a wheel.

    Args:
        wheel: The archive.
        version: The version of the package.
    """
    try:
        metadata = Metadata.from_email(_read(wheel, "METADATA"), validate=True)
    except ExceptionGroup as errors:
        return [f"{wheel.name}: {error}" for error in errors.exceptions if isinstance(error, InvalidMetadata)]
    faults = []
    if str(metadata.version) != version:
        faults.append(f"{wheel.name}: version {metadata.version}, not {version}")
    for name in ("summary", "requires_python", "license_expression", "license_files", "classifiers", "keywords"):
        if not getattr(metadata, name):
            faults.append(f"{wheel.name}: the metadata have no {name}")
    if not (metadata.description_content_type or "").startswith("text/markdown"):
        faults.append(f"{wheel.name}: the description is not declared as text/markdown")
    if "equipoise = equipoise.__main__:main" not in _read(wheel, "entry_points.txt"):
        faults.append(f"{wheel.name}: the command equipoise is missing")
    return faults + [f"README.md: an index removes the HTML {html!r}" for html in _html(metadata.description or "")]


def readme_notes(wheel: Path) -> list[str]:
    """Return that the README has links which a package index does not follow."""
    description = Metadata.from_email(_read(wheel, "METADATA"), validate=False).description or ""
    targets = [str(token.attrs.get("href", token.attrs.get("src", ""))) for token in _tokens(description)]
    relative = [target for target in targets if target and not re.match(r"https?:|#|mailto:", target)]
    if not relative:
        return []
    return [f"README.md: {len(relative)} links are relative, which lead nowhere on a package index"]


def _read(wheel: Path, name: str) -> str:
    """Return a file of the wheel's information."""
    with zipfile.ZipFile(wheel) as archive:
        (path,) = [path for path in archive.namelist() if path.endswith(f".dist-info/{name}")]
        return archive.read(path).decode()


def _html(text: str) -> list[str]:
    return [token.content for token in _tokens(text) if token.type in ("html_block", "html_inline")]


def _tokens(text: str) -> Iterator[Token]:
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        yield token
        yield from token.children or ()
