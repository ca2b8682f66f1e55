"""Assignments of one thing, names that say what things are, comments and docstrings: measured folder by folder.

The marks lie within what well-kept code bases of this field show. They are no style by themselves, and nothing is
gained by meeting them with empty comments or split expressions.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

import pytest

from tests.support.sources import FILES, PACKAGE, nodes_of

PACKED_OF_1000_LINES = 3
CONDITIONAL_OF_1000_LINES = 14
PERCENT_OF_QUESTIONS = 3
PERCENT_OF_VAGUE_NAMES = 1
FEWEST_LINES = 50  # of code; shares of less say nothing


# Fewest lines of comments in 1000 lines of code.
COMMENTS_OF_A_FOLDER = 50
COMMENTS_OF_THE_PACKAGE = 60

QUESTION = re.compile(r"(What|Whether|Where|Who|How|Why)\b")
QUOTED_QUESTION = re.compile(rf"['\"][\s\\]*{QUESTION.pattern}")  # as any docstring that is one begins
VAGUE = {
    *("made", "given", "told", "own", "found", "held", "kept", "each", "answer", "learned", "known", "wanted"),
    *("seen", "taken", "said", "asked", "there", "others", "whole"),
}


@dataclass
class Counts:
    """Counts of a folder."""

    lines: int = 0
    docstrings: int = 0
    questions: int = 0
    comments: int = 0
    packed: int = 0
    conditional: int = 0
    names: int = 0
    vague: int = 0

    def add(self, other: "Counts") -> None:
        for name in (field.name for field in fields(self)):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def beyond(self, fewest_comments: int) -> list[str]:
        """Return the marks that are not met."""
        thousands = self.lines / 1000
        upper = {
            "packed assignments in 1000 lines": (self.packed / thousands, PACKED_OF_1000_LINES),
            "conditional expressions in 1000 lines": (self.conditional / thousands, CONDITIONAL_OF_1000_LINES),
            "% of docstrings that begin with a question": (
                100 * self.questions / max(1, self.docstrings),
                PERCENT_OF_QUESTIONS,
            ),
            "% of vague names": (100 * self.vague / max(1, self.names), PERCENT_OF_VAGUE_NAMES),
        }
        texts = [f"{value:.1f} {name}, at most {mark}" for name, (value, mark) in upper.items() if value > mark]
        comments = self.comments / thousands
        if comments < fewest_comments:
            texts.append(f"{comments:.1f} comment lines in 1000 lines, at least {fewest_comments}")
        return texts


def comment_lines(source: str) -> set[int]:
    """Return the numbers of the lines that hold nothing but a comment."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.start[0] for token in tokens if token.type == tokenize.COMMENT and token.line.strip().startswith("#")}


def docstrings(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, ast.stmt]]:
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield text, node.body[0]


def is_packed(node: ast.AST) -> bool:
    """Tell whether an assignment packs several statements into one, as in `a, b = 1, 2`."""
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def measure(source: str, nodes: Sequence[ast.AST]) -> Counts:
    texts = list(docstrings(nodes))
    comments = comment_lines(source)
    of_docstrings = {number for _, node in texts for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    code = [
        line
        for number, line in enumerate(source.splitlines(), start=1)
        if line.strip() and number not in comments and number not in of_docstrings
    ]
    variables = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    arguments = [
        argument.arg for node in nodes if isinstance(node, ast.arguments) for argument in (*node.args, *node.kwonlyargs)
    ]
    names = [*variables, *arguments]
    return Counts(
        lines=len(code),
        docstrings=len(texts),
        questions=sum(bool(QUESTION.match(text)) for text, _ in texts),
        comments=len(comments),
        packed=sum(map(is_packed, nodes)),
        conditional=sum(isinstance(node, ast.IfExp) for node in nodes),
        names=len(names),
        vague=sum(name.strip("_") in VAGUE for name in names),
    )


@cache
def counted(path: Path) -> Counts:
    return measure(path.read_text(encoding="utf-8"), nodes_of(path))


def counted_together(paths: Iterable[Path]) -> Counts:
    counts = Counts()
    for path in paths:
        counts.add(counted(path))
    return counts


# Which files lie in a folder. They are measured in the tests: each process that collects tests imports this module.
FOLDERS: dict[str, list[Path]] = {}
for _path in FILES:
    FOLDERS.setdefault(_path.parent.relative_to(PACKAGE).as_posix(), []).append(_path)


def test_each_folder_can_be_read() -> None:
    counts = {folder: counted_together(paths) for folder, paths in FOLDERS.items()}
    beyond = {
        folder: each.beyond(COMMENTS_OF_A_FOLDER) for folder, each in counts.items() if each.lines >= FEWEST_LINES
    }
    assert not {folder: marks for folder, marks in beyond.items() if marks}


def test_the_package_can_be_read() -> None:
    beyond = counted_together(path for paths in FOLDERS.values() for path in paths).beyond(COMMENTS_OF_THE_PACKAGE)
    assert not beyond, "; ".join(beyond)


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "examples", "scripts"])
def test_docstrings_begin_with_a_verb_or_a_noun(folder: str) -> None:
    """Outside of the package as well."""
    questions = []
    for path in sorted((PACKAGE.parent / folder).rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if not QUOTED_QUESTION.search(source):
            continue  # few files are parsed
        for text, node in docstrings(ast.walk(ast.parse(source))):
            if QUESTION.match(text):
                questions.append(f"{path.relative_to(PACKAGE.parent)}:{node.lineno}: {text.splitlines()[0]}")
    assert not questions, "\n".join(questions)
