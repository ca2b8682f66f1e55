"""The text: documents of sentences of words, from files or from the documentation of the running Python."""

import ast
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Document", "read_documentation", "read_file"]

# A document is a list of sentences, a sentence a list of words.
Document = list[list[str]]

_ENDS = {".", "?", "!"}
_WORD = re.compile(r"\w+|[^\w\s]")


def read_file(path: str | Path) -> list[Document]:
    """Read a text in which words stand between spaces, such as WikiText; each line is a document.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: If there is none; the message names the files of the folder.
    """
    path = Path(path)
    if not path.is_file():
        names = "no such folder"
        if path.parent.is_dir():
            names = ", ".join(sorted(file.name for file in path.parent.iterdir()))
        raise FileNotFoundError(
            f"There is no {path.name} in {path.parent} ({names}). Name the folder by data.root=FOLDER, and its files"
            " by data.train_file=NAME and data.val_file=NAME."
        )
    with path.open(encoding="utf-8") as lines:
        return [sentences(line.lower().split()) for line in lines if line.strip()]


def read_documentation() -> dict[str, list[Document]]:
    """Read the docstrings of the standard library, by the name of the module.

    The sources of the running Python are parsed; no module is imported.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts = {}
    for name in sorted(sys.stdlib_module_names):
        paths = [folder / f"{name}.py", *sorted((folder / name).glob("*.py"))]
        documents = [document for path in paths if path.is_file() for document in _docstrings(path)]
        if documents:
            texts[name] = documents
    return texts


def sentences(words: list[str]) -> Document:
    """Cut words into sentences, after each `.`, `?` and `!`.

    Args:
        words: The words of a document.

    Example:
        >>> sentences("it is . is it".split())
        [['it', 'is', '.'], ['is', 'it']]
    """
    document: Document = [[]]
    for word in words:
        document[-1].append(word)
        if word in _ENDS:
            document.append([])
    return [sentence for sentence in document if sentence]


def _docstrings(path: Path) -> Iterator[Document]:
    documented = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, documented):
            text = ast.get_docstring(node)
            if text:
                yield sentences(_WORD.findall(text.lower()))
