"""The tests that may catch a mutation."""

import ast
from itertools import takewhile
from pathlib import Path

from record import Record
from samples import Sample

__all__ = ["chosen_tests"]


def chosen_tests(sample: Sample, record: Record, checkout: Path, count: int, seconds: float) -> list[str]:
    """Return the tests that may catch a mutation, the nearest and shortest first.

    Those that run its line. Where none does, or the line runs as the file is imported: those that run any line of the
    file, and those in files that mirror or import it.

    Args:
        sample: The mutation.
        record: Which test runs which line.
        checkout: The checkout.
        count: Most tests.
        seconds: Longest duration of all together, by the record; one test may last longer.
    """
    tests = record.tests_of(sample.path, sample.mutation.line)
    source = (checkout / "equipoise" / sample.path).read_text()
    if not tests or not _in_function(source, sample.mutation.line):
        near = _files_that_mirror_or_import(sample.path, checkout)
        tests = record.tests_of(sample.path, 0) | {test for test in record.seconds if test.partition("::")[0] in near}
    mirror = ("tests", *Path(sample.path).with_name(f"test_{Path(sample.path).name}").parts)

    def steps(test: str) -> tuple[int, str]:
        """Return how many folders lie between a test and where the file's own would be, and its file."""
        file = test.partition("::")[0]
        parts = Path(file).parts
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(mirror, parts, strict=False)))
        return len(mirror) + len(parts) - 2 * common, file

    chosen: list[str] = []
    for test in sorted(tests, key=lambda test: (steps(test), record.seconds[test])):
        seconds -= record.seconds[test]
        if (chosen and seconds < 0) or len(chosen) == count:
            break
        chosen.append(test)
    return chosen


def _in_function(source: str, line: int) -> bool:
    functions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.FunctionDef, ast.Lambda)))
    for function in functions:
        body = function.body[0] if isinstance(function, ast.FunctionDef) else function.body
        if body.lineno <= line <= (function.end_lineno or line):
            return True
    return False


def _files_that_mirror_or_import(path: str, checkout: Path) -> set[str]:
    module = ".".join(("equipoise", *Path(path).with_suffix("").parts))
    mirror = checkout / "tests" / Path(path).with_name(f"test_{Path(path).name}")
    files = (checkout / "tests").rglob("test_*.py")
    return {str(file.relative_to(checkout)) for file in files if file == mirror or module in file.read_text()}
