"""Small mutations of Python source: another comparison, another sign, a missing statement.

The operators are those of mutation testing as DeMillo, Lipton and Sayward describe it (Hints on test data selection,
1978): each mutation changes one expression or leaves out one statement, as a slip of a programmer would.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Mutation", "mutations_of"]

COMPARISONS: dict[type[ast.cmpop], ast.cmpop] = {
    ast.Lt: ast.LtE(),
    ast.LtE: ast.Lt(),
    ast.Gt: ast.GtE(),
    ast.GtE: ast.Gt(),
    ast.Eq: ast.NotEq(),
    ast.NotEq: ast.Eq(),
    ast.Is: ast.IsNot(),
    ast.IsNot: ast.Is(),
    ast.In: ast.NotIn(),
    ast.NotIn: ast.In(),
}
ARITHMETIC: dict[type[ast.operator], ast.operator] = {
    ast.Add: ast.Sub(),
    ast.Sub: ast.Add(),
    ast.Mult: ast.Div(),
    ast.Div: ast.Mult(),
    ast.FloorDiv: ast.Mult(),
    ast.Mod: ast.FloorDiv(),
}


@dataclass(frozen=True)
class Mutation:
    """A change of one place in a file.

    Attributes:
        line: Number of the line, from 1.
        column: Number of bytes before it in its line.
        end_line: Number of the line in which the replaced text ends.
        end_column: Number of bytes before that end.
        before: The replaced expression or statement.
        after: Its replacement.
    """

    line: int
    column: int
    end_line: int
    end_column: int
    before: str
    after: str

    def apply(self, source: str) -> str:
        """Return the mutated source."""
        lines = source.encode().splitlines(keepends=True)
        start = sum(map(len, lines[: self.line - 1])) + self.column
        end = sum(map(len, lines[: self.end_line - 1])) + self.end_column
        content = b"".join(lines)
        replacement = self.after.encode()
        return (content[:start] + replacement + content[end:]).decode()


def mutations_of(source: str) -> list[Mutation]:
    r"""Return all mutations of a file, in the order of its lines.

    Annotations, docstrings, imports and text are left as they are. So is code for type checkers only.

    Example:
        >>> [mutation.after for mutation in mutations_of("def f(x):\n    return x < 1\n")]
        ['return None', '(x <= 1)', '2']
    """
    tree = ast.parse(source)
    found: list[Mutation] = []
    for node in _mutable(tree):
        for replacement in _replacements(node):
            found.append(_mutation(node, replacement))
    return sorted(found, key=lambda mutation: (mutation.line, mutation.column, -mutation.end_column))


def _mutable(node: ast.AST) -> Iterator[ast.AST]:
    """Walk over a tree, without what does not run or cannot matter."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    if isinstance(node, (ast.Import, ast.ImportFrom, ast.JoinedStr)):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "type_params"):
            continue
        children = value if isinstance(value, list) else [value]
        for child in children:
            if isinstance(child, ast.AST):
                yield from _mutable(child)


def _replacements(node: ast.AST) -> Iterator[str]:
    """Yield the source of each mutation of one node."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        operator = COMPARISONS[type(node.ops[0])]
        yield f"({ast.unparse(ast.Compare(node.left, [operator], node.comparators))})"
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        yield f"({ast.unparse(ast.BinOp(node.left, ARITHMETIC[type(node.op)], node.right))})"
    elif isinstance(node, ast.BoolOp):
        operator = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield f"({ast.unparse(ast.BoolOp(operator, node.values))})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"bool({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant):
        yield from _other_constants(node.value)
    elif isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        yield "return None"
    elif _can_be_left_out(node):
        yield "pass"


def _can_be_left_out(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    return isinstance(node, (ast.Break, ast.Continue, ast.AugAssign))


def _other_constants(value: object) -> Iterator[str]:
    if isinstance(value, bool):
        yield str(not value)
    elif isinstance(value, int):
        yield str(value + 1)


def _mutation(node: ast.AST, after: str) -> Mutation:
    assert isinstance(node, (ast.expr, ast.stmt))
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return Mutation(node.lineno, node.col_offset, node.end_lineno, node.end_col_offset, ast.unparse(node), after)
