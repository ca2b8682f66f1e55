"""A file system elsewhere, `mock://`, that several processes share: files of this machine under another protocol.

It is like a store of objects: folders come and go with their files. Faults can be planted in its writes.
"""

import os
import re
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.local import LocalFileOpener, LocalFileSystem

__all__ = ["Elsewhere", "url_of"]


class Elsewhere(LocalFileSystem):
    """Files whose URLs are `mock://` and a path of this machine."""

    protocol = "mock"
    # A pattern of the names whose content is lost in the midst of a write, in this process; empty: none.
    faulty: ClassVar[str] = ""

    def __init__(self, **options: Any) -> None:
        super().__init__(auto_mkdir=True, **options)

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(super()._strip_protocol(os.fspath(path).removeprefix("mock://")))

    def makedirs(self, path: Any, exist_ok: bool = False) -> None:
        """Make no folder: it comes with its first file."""

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        kind = LocalFileOpener
        if self.faulty and "w" in mode and re.search(self.faulty, path):
            kind = _Faulty
        return kind(path, mode, fs=self, **options)

    def rm_file(self, path: Any) -> None:
        """Remove a file, and its folder with the last one."""
        super().rm_file(path)
        parent = Path(self._strip_protocol(path)).parent
        if not any(parent.iterdir()):
            parent.rmdir()


class _Faulty(LocalFileOpener):
    def write(self, data: Any, *args: Any, **options: Any) -> Any:
        super().write(bytes(data)[: len(data) // 2])
        self.f.flush()
        raise ConnectionError("the line is dead")


def url_of(path: Path) -> str:
    """Return the URL of a file or folder of this machine."""
    return f"mock://{path}"


fsspec.register_implementation("mock", Elsewhere, clobber=True)
