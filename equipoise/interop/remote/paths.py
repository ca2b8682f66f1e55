"""Paths of this machine, and paths elsewhere: URLs of fsspec, such as "s3://bucket/run"."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Union

from fsspec import available_protocols

from equipoise.errors import ConfigurationError

if TYPE_CHECKING:
    from equipoise.interop.remote.files import RemotePath

__all__ = ["AnyPath", "is_remote", "to_path"]

AnyPath = Union[Path, "RemotePath"]
"""A path of this machine, or elsewhere."""

_LOCAL = "file://"
# What pathlib makes of a URL: "s3:/bucket".
_COLLAPSED = re.compile(r"(?:^|[/\\])([a-z][a-z0-9+.-]+):[/\\](?![/\\])")


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a URL of another file system.

    Args:
        path: The path, or the URL.

    Example:
        >>> is_remote("s3://bucket/last.ckpt"), is_remote("last.ckpt"), is_remote("file:///data/last.ckpt")
        (True, False, False)
    """
    text = os.fspath(path)
    return "://" in text and not text.startswith(_LOCAL)


def to_path(path: str | os.PathLike[str]) -> AnyPath:
    """Return a path of this machine, or elsewhere.

    Args:
        path: A path, or a URL that fsspec knows.

    Raises:
        ConfigurationError: If pathlib has made a path of a URL.

    Example:
        >>> to_path("file:///data/last.ckpt")
        PosixPath('/data/last.ckpt')
        >>> to_path("s3://bucket/run/") / "last.ckpt"
        RemotePath('s3://bucket/run/last.ckpt')
    """
    text = os.fspath(path)
    if is_remote(text):
        # A run on this machine alone does not load it.
        from equipoise.interop.remote.files import RemotePath

        return RemotePath(text)
    collapsed = _COLLAPSED.search(text)
    if collapsed is not None and collapsed[1] in available_protocols():
        raise ConfigurationError(
            f"{text!r} was a URL, of which pathlib has made a path of this machine. Pass it as text:"
            f" '{collapsed[1]}://...'."
        )
    return Path(text.removeprefix(_LOCAL))
