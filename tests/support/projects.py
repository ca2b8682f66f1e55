"""A project of a user: its files in a folder, in which the process of a test stands."""

import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from pathlib import Path

__all__ = ["project_in", "write"]


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Write files.

    Args:
        folder: Where they go.
        files: Their contents, which may be indented as a whole, by their paths in the folder.
    """
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(content), encoding="utf-8")


@contextmanager
def project_in(folder: Path, files: Mapping[str, str], *packages: str) -> Iterator[Path]:
    """Write a project and stand in its folder for a `with` block; yields the folder.

    Args:
        folder: The folder.
        files: The files; see `write`.
        packages: Packages that are forgotten after the block, as the next test imports others of these names.
    """
    write(folder, files)
    with chdir(folder):
        yield folder
    imported = [name for name in sys.modules if name.partition(".")[0] in packages]
    for name in imported:
        del sys.modules[name]
