"""Checks of a wheel's metadata, and of the README as a package index shows it."""

import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token
from packaging.metadata import InvalidMetadata, Metadata

__all__ = ["metadata_faults"]


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
    return [*faults, *_description_faults(metadata.description or "")]


def _description_faults(description: str) -> Iterator[str]:
    """Yield what a package index does not show."""
    for token in _tokens(description):
        if token.type in ("html_block", "html_inline"):
            yield f"README.md: an index removes the HTML {token.content!r}"
        target = str(token.attrs.get("href", token.attrs.get("src", "")))
        if target and not re.match(r"https?:|#|mailto:", target):
            yield f"README.md: the link to {target} leads nowhere on a package index"


def _read(wheel: Path, name: str) -> str:
    """Return a file of the wheel's information."""
    with zipfile.ZipFile(wheel) as archive:
        (path,) = [path for path in archive.namelist() if path.endswith(f".dist-info/{name}")]
        return archive.read(path).decode()


def _tokens(text: str) -> Iterator[Token]:
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        yield token
        yield from token.children or ()
