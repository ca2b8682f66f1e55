"""Files elsewhere: URLs of fsspec with the methods of `pathlib.Path` that runs need."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

from lightning.fabric.utilities.cloud_io import get_filesystem

from equipoise.errors import ConfigurationError

__all__ = ["RemotePath"]


class RemotePath(os.PathLike[str]):
    """A file or folder of another file system.

    Other processes write there, too, so nothing about folders is cached.

    Args:
        url: Its URL.
    """

    def __init__(self, url: str) -> None:
        # The root of a file system keeps its slashes: "memory://".
        self._url = re.sub("(?<!:)(?<!:/)/+$", "", url)

    def __fspath__(self) -> str:
        return self._url

    def __str__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"RemotePath({self._url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and self._url == other._url

    def __hash__(self) -> int:
        return hash(self._url)

    # Names.

    def __truediv__(self, name: str) -> "RemotePath":
        slash = "" if self._url.endswith("/") else "/"
        return RemotePath(f"{self._url}{slash}{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return PurePosixPath(self._url).name

    @property
    def stem(self) -> str:
        """The last part without its suffix."""
        return PurePosixPath(self._url).stem

    @property
    def suffix(self) -> str:
        """The end of the name from its last dot on."""
        return PurePosixPath(self._url).suffix

    @property
    def parent(self) -> "RemotePath":
        """The folder in which it lies; of the root the root itself."""
        if self._url.endswith("/"):
            return self
        return RemotePath(self._url.rpartition("/")[0] + "/")

    @property
    def parents(self) -> list["RemotePath"]:
        """The folders around it, the innermost first."""
        folders = []
        path = self
        while path.parent != path:
            path = path.parent
            folders.append(path)
        return folders

    def with_name(self, name: str) -> "RemotePath":
        """Return another path in the same folder."""
        return self.parent / name

    # What is there.

    @property
    def filesystem(self) -> Any:
        """The file system, as fsspec has it for the present thread.

        Raises:
            ConfigurationError: If fsspec does not know it, or its package is not installed.
        """
        try:
            filesystem = get_filesystem(self._url)
        except (ImportError, ValueError) as error:
            raise ConfigurationError(f"{self._url!r} cannot be used: {error}.") from error
        filesystem.invalidate_cache()
        return filesystem

    def exists(self) -> bool:
        """Return whether a file or a folder has this name."""
        return bool(self.filesystem.exists(self._url))

    def is_file(self) -> bool:
        """Return whether it is a file."""
        return bool(self.filesystem.isfile(self._url))

    def is_dir(self) -> bool:
        """Return whether it is a folder. On a web server nothing is: to ask would be to read the file."""
        return not self._url.startswith(("http://", "https://")) and bool(self.filesystem.isdir(self._url))

    def stat(self) -> "_Status":
        """Return the size of a file, and the time at which it was written."""
        return _Status(self)

    def iterdir(self) -> Iterator["RemotePath"]:
        """Yield what lies in the folder."""
        for name in self.filesystem.ls(self._url, detail=False):
            yield self / PurePosixPath(str(name)).name

    def glob(self, pattern: str) -> Iterator["RemotePath"]:
        """Yield what lies in the folder and has a name like a pattern; one that begins with "**/" means all below it.

        Args:
            pattern: A pattern of names, as of a shell.
        """
        name_pattern = pattern.removeprefix("**/")
        with suppress(FileNotFoundError):
            # Names that file systems return lack the protocol, so each is asked for by its folder.
            for entry in self.filesystem.ls(self._url, detail=True):
                path = self / PurePosixPath(entry["name"]).name
                if fnmatchcase(path.name, name_pattern):
                    yield path
                if pattern != name_pattern and entry["type"] == "directory":
                    yield from path.glob(pattern)

    # Contents.

    def open(self, mode: str = "rb", **options: Any) -> Any:
        """Open the file.

        Args:
            mode: See `open`. Default: "rb".
            options: Further arguments, such as `encoding` and `newline` for text.
        """
        return self.filesystem.open(self._url, mode, **options)

    def read_bytes(self) -> bytes:
        """Return the content."""
        with self.open() as file:
            return bytes(file.read())

    def read_text(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Return the content as text."""
        return self.read_bytes().decode(encoding, errors)

    def write_bytes(self, data: bytes) -> int:
        """Write the file completely or not at all, and return the number of bytes."""
        filesystem = self.filesystem
        with filesystem.transaction, filesystem.open(self._url, "wb") as file:
            file.write(data)
        return len(data)

    def write_text(self, text: str, encoding: str = "utf-8", errors: str = "strict") -> int:
        """Write the file completely or not at all, and return the number of bytes."""
        return self.write_bytes(text.encode(encoding, errors))

    # Folders.

    def mkdir(self, *, parents: bool = True, exist_ok: bool = True) -> None:
        """Make a folder, where the file system has any."""
        self.filesystem.makedirs(self._url, exist_ok=exist_ok)

    def rmdir(self) -> None:
        """Remove a folder if it is empty, where the file system has any."""
        with suppress(OSError, NotImplementedError):
            self.filesystem.rmdir(self._url)

    def rename(self, target: str | os.PathLike[str]) -> "RemotePath":
        """Give it another name, and return that; many file systems copy it for that."""
        self.filesystem.mv(self._url, os.fspath(target), recursive=True)
        return RemotePath(os.fspath(target))

    def unlink(self, *, missing_ok: bool = False) -> None:
        """Remove a file."""
        try:
            self.filesystem.rm_file(self._url)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove(self) -> None:
        """Remove a file, or a folder with all in it; nothing if there is none.

        The `rm` of fsspec takes brackets and stars of a name for a pattern, so it may remove other files.
        """
        filesystem = self.filesystem
        if not any(character in self._url for character in "*?["):
            if filesystem.exists(self._url):
                filesystem.rm(self._url, recursive=True)
            return
        for name in filesystem.find(self._url):
            filesystem.rm_file(name)
        self.rmdir()


@dataclass(frozen=True)
class _Status:
    """Facts about a file, asked for one by one.

    Attributes:
        path: The file.
    """

    path: RemotePath

    @property
    def st_size(self) -> int:
        """Its size in bytes."""
        return int(self.path.filesystem.size(os.fspath(self.path)))

    @property
    def st_mtime_ns(self) -> int:
        """The time at which it was written, in nanoseconds; 0 if the file system does not tell."""
        try:
            written = self.path.filesystem.modified(os.fspath(self.path))
        except NotImplementedError:
            if not self.path.exists():
                raise FileNotFoundError(os.fspath(self.path)) from None
            return 0
        return int(written.timestamp() * 1e9)
