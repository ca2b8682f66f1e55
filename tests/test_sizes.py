"""No function of the package is too long for one screen, and no line too wide."""

import ast
from collections.abc import Iterable

import pytest

from tests.support.sources import FILES, nodes_of, relative

LINES_OF_A_FUNCTION = 60
COLUMNS = 120

Function = ast.FunctionDef | ast.AsyncFunctionDef


def lines_of_code(function: Function) -> int:
    """The lines of the body, from the first statement after the docstring to the last."""
    body = function.body
    if ast.get_docstring(function, clean=False) is not None:
        body = body[1:]
    if not body:
        return 0
    return (body[-1].end_lineno or 0) - body[0].lineno + 1


def long_functions(name: str, nodes: Iterable[ast.AST], most: int) -> list[str]:
    functions = (node for node in nodes if isinstance(node, Function))
    sized = [(lines_of_code(function), function) for function in functions]
    return [f"{name}:{function.lineno} {function.name}: {lines}" for lines, function in sized if lines > most]


def test_functions() -> None:
    too_long = [line for path in FILES for line in long_functions(relative(path), nodes_of(path), LINES_OF_A_FUNCTION)]
    assert not too_long, f"more than {LINES_OF_A_FUNCTION} lines of code:\n" + "\n".join(too_long)


def test_lines() -> None:
    """Also those that ruff passes over: one long word, an address."""
    wide = [
        f"{relative(path)}:{number}"
        for path in FILES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if len(line) > COLUMNS
    ]
    assert not wide, f"more than {COLUMNS} characters: {wide}"


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("def f(\n    a,\n    b,\n):\n    '''One.\n\n    Two.\n    '''\n    x = 1\n\n    return x\n", 3),
        ("def f():\n    '''Only this.'''\n", 0),
        ("async def f():\n    return (\n        1\n    )\n", 3),
    ],
)
def test_signature_and_docstring_are_not_counted(source: str, lines: int) -> None:
    (function,) = ast.parse(source).body
    assert isinstance(function, Function)
    assert lines_of_code(function) == lines
    assert bool(long_functions("f", [function], 2)) == (lines > 2)
