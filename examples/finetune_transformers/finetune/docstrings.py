"""The texts: docstrings of two kinds of modules of Python's standard library, read from the running Python."""

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

__all__ = ["KINDS", "labelled_docstrings"]

# Names of modules and packages; those that this version of Python lacks are passed over.
KINDS = {
    "network": (
        *("email", "ftplib", "http", "imaplib", "ipaddress", "mailbox", "nntplib", "poplib", "smtplib", "socket"),
        *("socketserver", "ssl", "telnetlib", "urllib", "webbrowser", "wsgiref", "xmlrpc"),
    ),
    "development": (
        *("ast", "bdb", "cProfile", "code", "dis", "doctest", "importlib", "inspect", "modulefinder", "pdb", "profile"),
        *("pstats", "pyclbr", "pydoc", "tokenize", "trace", "traceback", "tracemalloc", "typing", "unittest"),
    ),
}
_DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef


def labelled_docstrings(*, fewest_words: int = 4) -> list[tuple[str, int]]:
    """Read the docstrings and the number of their kind, each text once, in the order of the alphabet.

    The sources are parsed; no module is imported. A text that occurs in both kinds is left out.

    Args:
        fewest_words: Shorter docstrings are left out. Default: 4.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts_of_kinds = [{text for name in names for text in _docstrings(folder, name)} for names in KINDS.values()]
    in_both = set.intersection(*texts_of_kinds)
    return sorted(
        (text, kind)
        for kind, texts in enumerate(texts_of_kinds)
        for text in texts - in_both
        if len(text.split()) >= fewest_words
    )


def _docstrings(folder: Path, name: str) -> Iterator[str]:
    for path in (folder / f"{name}.py", *sorted((folder / name).rglob("*.py"))):
        if path.is_file():
            documented = (node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, _DOCUMENTED))
            texts = (ast.get_docstring(node) for node in documented)
            yield from (text for text in texts if text)
