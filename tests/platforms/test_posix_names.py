"""Names that Windows lacks are used in functions of a few files, and never while the package is imported."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

import equipoise
from tests.platforms.windows import LACKING, MODULES

PACKAGE = Path(equipoise.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "starter" not in path.relative_to(PACKAGE).parts)
NAMES = {module.__name__: set(names) for module, names in LACKING.items()}

# The files that use such names in functions, each with the reason why Windows never gets there, or gets on.
STARTS_WORKERS = "called once `require_workers` has agreed"
USERS = {
    "memory/resident_set.py": "has another way on Windows",
    "parallel/payload/shared_payload.py": STARTS_WORKERS,
    "parallel/unfinished_files.py": "looks for locks",
    "parallel/workers/bounded_call.py": STARTS_WORKERS,
    "parallel/workers/launch.py": STARTS_WORKERS,
    "parallel/workers/messages/reports.py": STARTS_WORKERS,
    "parallel/workers/worker_main.py": STARTS_WORKERS,
    "parallel/workers/worker_process.py": STARTS_WORKERS,
    "extensions/pipeline/messaging/heartbeat.py": "looks for the name",
    "trainer/runtime/signals.py": "in a job of Slurm",
    "trainer/runtime/slurm.py": "in a job of Slurm",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def is_guard(node: ast.AST) -> bool:
    """Tell whether what is in a node runs only where a name is there, or is for type checkers."""
    if isinstance(node, ast.If | ast.IfExp):
        return any(word in ast.unparse(node.test) for word in ("hasattr(", "TYPE_CHECKING"))
    if isinstance(node, ast.With):
        return any("suppress(ImportError" in ast.unparse(item) for item in node.items)
    return False


def uses(node: ast.AST, *, in_function: bool = False) -> Iterator[tuple[int, str, bool]]:
    """Yield line and name of each use that has no guard, and whether it stands in a function."""
    for child in ast.iter_child_nodes(node):
        if is_guard(child):
            continue
        names = []
        if isinstance(child, ast.Import):
            names = [alias.name for alias in child.names if alias.name in MODULES]
        elif isinstance(child, ast.ImportFrom):
            full_names = [f"{child.module}.{alias.name}" for alias in child.names]
            names = [name for name in [str(child.module), *full_names] if name in MODULES]
            names += [
                f"{child.module}.{each.name}" for each in child.names if each.name in NAMES.get(child.module or "", ())
            ]
        elif isinstance(child, ast.Attribute) and isinstance(child.value, ast.Name):
            module = child.value.id
            names = [f"{module}.{child.attr}"] if child.attr in NAMES.get(module, ()) else []
        yield from ((child.lineno, name, in_function) for name in names)  # type: ignore[attr-defined]
        # Decorators and defaults of a function run when it is defined; they are rare, and hold no such names.
        yield from uses(child, in_function=in_function or isinstance(child, Function))


@cache
def uses_by_file() -> dict[str, list[tuple[int, str, bool]]]:
    words = [name.rpartition(".")[2] for name in MODULES]
    any_name = re.compile(rf"\b({'|'.join(words + list(chain(*NAMES.values())))})\b")
    texts = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in FILES}
    return {file: list(uses(ast.parse(text))) for file, text in texts.items() if any_name.search(text)}


def test_no_import_needs_posix() -> None:
    found = [
        f"{file}:{line} {name}"
        for file, used in uses_by_file().items()
        for line, name, in_function in used
        if not in_function
    ]
    assert not found


@pytest.mark.whole_package
def test_only_some_files_use_names_of_posix() -> None:
    assert {file for file, used in uses_by_file().items() if used} == USERS.keys()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import fcntl", [(1, "fcntl", False)]),
        ("from multiprocessing import forkserver", [(1, "multiprocessing.forkserver", False)]),
        ("from os import getcwd, fork", [(1, "os.fork", False)]),
        ("import signal\nNUMBER = signal.SIGUSR1", [(2, "signal.SIGUSR1", False)]),
        ("class A:\n    def f(self):\n        os.killpg(1, 2)", [(3, "os.killpg", True)]),
        ("with suppress(ImportError):\n    import fcntl", []),
        ("PAGE = os.sysconf('a') if hasattr(os, 'sysconf') else 4096", []),
        ("import os, signal\nos.getpid(), signal.SIGTERM, os.O_RDONLY", []),
    ],
)
def test_every_form_of_use_is_seen(source: str, expected: list[tuple[int, str, bool]]) -> None:
    """A check that sees nothing would let everything pass."""
    assert list(uses(ast.parse(source))) == expected
