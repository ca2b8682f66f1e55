"""Assignments of one thing, names that say what things are, comments and docstrings: measured folder by folder.

The marks lie within what well-kept code bases of this field show. They are no style by themselves, and nothing is
gained by meeting them with empty comments or split expressions.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
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


@cache
def counted(path: Path) -> Counter[str]:
    """Return what the marks are about: lines of code, docstrings, names, and those that are less readable."""
    source, nodes = path.read_text(encoding="utf-8"), nodes_of(path)
    texts = list(docstrings(nodes))
    comments = comment_lines(source)
    of_docstrings = {number for _, node in texts for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    lines = enumerate(source.splitlines(), start=1)
    names = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    for node in nodes:
        if isinstance(node, ast.arguments):
            names += [argument.arg for argument in (*node.args, *node.kwonlyargs)]
    return Counter(
        {
            "lines": sum(bool(line.strip()) and number not in comments | of_docstrings for number, line in lines),
            "docstrings": len(texts),
            "questions": sum(bool(QUESTION.match(text)) for text, _ in texts),
            "comments": len(comments),
            "packed": sum(map(is_packed, nodes)),
            "conditional": sum(isinstance(node, ast.IfExp) for node in nodes),
            "names": len(names),
            "vague": sum(name.strip("_") in VAGUE for name in names),
        }
    )


def beyond(counts: Counter[str], fewest_comments: int) -> list[str]:
    """Return the marks that are not met."""
    thousands = counts["lines"] / 1000
    shares = {
        "packed assignments in 1000 lines": (counts["packed"] / thousands, PACKED_OF_1000_LINES),
        "conditional expressions in 1000 lines": (counts["conditional"] / thousands, CONDITIONAL_OF_1000_LINES),
        "% of questions among docstrings": (100 * counts["questions"] / counts["docstrings"], PERCENT_OF_QUESTIONS),
        "% of vague names": (100 * counts["vague"] / counts["names"], PERCENT_OF_VAGUE_NAMES),
    }
    texts = [f"{value:.1f} {name}, at most {mark}" for name, (value, mark) in shares.items() if value > mark]
    if counts["comments"] < fewest_comments * thousands:
        texts.append(f"{counts['comments']} comment lines, at least {fewest_comments} in 1000 lines")
    return texts


# Which files lie in a folder. They are measured in the tests: each process that collects tests imports this module.
FOLDERS: dict[str, list[Path]] = {}
for _path in FILES:
    FOLDERS.setdefault(_path.parent.relative_to(PACKAGE).as_posix(), []).append(_path)


def test_each_folder_and_the_package_can_be_read() -> None:
    counts = {folder: sum(map(counted, paths), Counter()) for folder, paths in FOLDERS.items()}
    marks = {
        folder: beyond(each, COMMENTS_OF_A_FOLDER) for folder, each in counts.items() if each["lines"] >= FEWEST_LINES
    }
    marks["the package"] = beyond(sum(counts.values(), Counter()), COMMENTS_OF_THE_PACKAGE)
    assert not {place: texts for place, texts in marks.items() if texts}


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
