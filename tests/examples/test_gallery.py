"""Properties of all newer examples: they are short, complete, and show what they do."""

import ast
import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# Files that only read data, beside which an example has at most 150 lines of code.
READERS = {
    "pyramidnet": {"data.py", "cifar10.py", "idx.py"},
    "gan": {"data.py", "idx.py"},
    "ensemble": {"data.py"},
}
MOST_LINES = 150
MOST_BYTES_OF_A_PICTURE = 60_000
NAMES = sorted(READERS)


def lines_of_code(path):
    """The number of lines of a file without blank ones, comments and docstrings."""
    source = path.read_text(encoding="utf-8")
    skipped = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            skipped |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = [line.strip() for number, line in enumerate(source.splitlines(), start=1) if number not in skipped]
    return sum(bool(line) and not line.startswith("#") for line in lines)


@pytest.mark.parametrize("name", NAMES)
def test_is_short(name):
    files = [path for path in (EXAMPLES / name / name).glob("*.py") if path.name not in READERS[name]]
    assert 0 < sum(map(lines_of_code, files)) < MOST_LINES


@pytest.mark.parametrize("name", NAMES)
def test_shows_a_command_and_a_picture(name):
    text = (EXAMPLES / name / "README.md").read_text(encoding="utf-8")
    assert re.search(r"^equipoise fit", text, re.MULTILINE)
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert pictures
    for picture in pictures:
        assert (EXAMPLES / name / picture).stat().st_size < MOST_BYTES_OF_A_PICTURE


def test_readers_of_idx_files_are_copies_of_one():
    """An example is a folder that works wherever it is copied to, so each has the reader. `mnist` tests it."""
    original, *copies = [EXAMPLES / name / name / "idx.py" for name in ("mnist", "pyramidnet", "gan")]
    assert {copy.read_bytes() for copy in copies} == {original.read_bytes()}
