"""The source files of the package, parsed once in a process for all tests that read them."""

import ast
import gc
from functools import cache
from pathlib import Path

import equipoise

__all__ = ["FILES", "PACKAGE", "holds_private_names", "module_name", "nodes_of", "relative", "tree_of"]

PACKAGE = Path(equipoise.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def holds_private_names(path: Path) -> bool:
    """Return whether private names of other packages may stand in a file: in `interop`, of the core or an extension."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0] == "interop" or (parts[0] == "extensions" and parts[2:3] == ("interop",))


def module_name(path: Path) -> str:
    parts = ["equipoise", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file, which nobody changes; any file beside those of the package is parsed anew."""
    tree = _trees().get(path)
    return ast.parse(path.read_text(encoding="utf-8")) if tree is None else tree


def nodes_of(path: Path) -> list[ast.AST]:
    """Return all nodes of a file of the package, as `ast.walk` yields them."""
    return _nodes().get(path) or list(ast.walk(tree_of(path)))


@cache
def _trees() -> dict[Path, ast.Module]:
    gc.collect()
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
    gc.freeze()  # later collections of garbage would look through half a million nodes
    return trees


@cache
def _nodes() -> dict[Path, list[ast.AST]]:
    return {path: list(ast.walk(tree)) for path, tree in _trees().items()}
