"""Imports of a source file, with those in functions, with or without those for type checkers."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support.sources import relative, tree_of

__all__ = ["imports", "is_for_typing"]


def is_for_typing(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


@cache
def imports(path: Path, *, typing: bool) -> list[tuple[str, str | None, bool]]:
    """Return module, name (None: the module itself), and whether the import stands in a function, for each import.

    Args:
        path: The file.
        typing: Whether imports for type checkers count.
    """
    return list(_find_imports(path, typing=typing))


def _find_imports(path: Path, *, typing: bool) -> Iterator[tuple[str, str | None, bool]]:
    for node, in_function in _walk(tree_of(path), typing=typing):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None, in_function) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno}: imports are absolute"
            yield from ((node.module or "", alias.name, in_function) for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("import_module", "importlib.import_module")
            and isinstance(node.args[0], ast.Constant)
        ):
            yield str(node.args[0].value), None, in_function


def _walk(node: ast.AST, *, typing: bool, in_function: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Every node, and whether it stands in a function; what is there for typing only is passed over unless wanted."""
    for child in ast.iter_child_nodes(node):
        if is_for_typing(child) and not typing:
            for branch in child.orelse:
                yield branch, in_function
                yield from _walk(branch, typing=typing, in_function=in_function)
            continue
        yield child, in_function
        inner = in_function or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield from _walk(child, typing=typing, in_function=inner)
