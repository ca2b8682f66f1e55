"""The text: documentation or sources of the running Python, or a file."""

import ast
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

__all__ = ["read_text"]

_DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef


def read_text(text: str, characters: int) -> str:
    """Read the beginning of a text.

    Args:
        text: "docstrings" or "sources" of the standard library, in the order of the alphabet, or the path of a file.
        characters: Number of characters that are read at most.

    Raises:
        FileNotFoundError: If there is no such file.
    """
    read: list[str] = []
    length = 0
    for part in _parts(text):
        read.append(part)
        length += len(part)
        if length >= characters:
            break
    return "\n\n".join(read)[:characters]


def _parts(text: str) -> Iterator[str]:
    if text == "docstrings":
        yield from _docstrings()
    elif text == "sources":
        for path in _sources():
            yield path.read_text(encoding="utf-8", errors="replace")
    elif Path(text).is_file():
        yield Path(text).read_text(encoding="utf-8")
    else:
        raise FileNotFoundError(f"data.text={text!r} is neither 'docstrings' nor 'sources', and there is no such file.")


def _sources() -> Iterator[Path]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    for name in sorted(sys.stdlib_module_names):
        paths = [folder / f"{name}.py", *sorted((folder / name).glob("*.py"))]
        yield from (path for path in paths if path.is_file())


def _docstrings() -> Iterator[str]:
    for path in _sources():
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, _DOCUMENTED):
                text = ast.get_docstring(node)
                if text:
                    yield text
