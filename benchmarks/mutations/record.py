"""Which test runs which lines of the package, and how long it takes."""

import json
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

__all__ = ["Record"]


class Record:
    """Record that recorders have written; see `recorder.Recorder`.

    Args:
        folder: A folder with theirs.
        paths: The files of the package that are asked for, to save memory. Default: none.

    Attributes:
        seconds: Duration of each test that passed.
        lines: For each file, the lines that each test runs, as the bits of a number.
        arcs: For each file, all jumps from line to line.
    """

    def __init__(self, folder: Path, paths: Collection[str] = ()) -> None:
        self.seconds: dict[str, float] = {}
        self.lines: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self.arcs: dict[str, set[tuple[int, int]]] = defaultdict(set)
        for file in sorted(folder.rglob("*.jsonl")):
            with file.open() as entries:
                for entry in map(json.loads, entries):
                    self._add(entry, paths)

    def _add(self, entry: dict[str, Any], paths: Collection[str]) -> None:
        for path, arcs in entry.get("arcs", {}).items():
            self.arcs[path].update(map(tuple, arcs))
        for path, lines in entry.get("lines", {}).items():
            if path in paths:
                self.lines[path][entry["test"]] |= int(lines, 16)
        if entry.get("failed") is False:
            self.seconds[entry["test"]] = entry["seconds"]

    def tests_of(self, path: str, line: int) -> set[str]:
        """Return the tests that passed and run a line; line 0 stands for any line."""
        lines = self.lines[path]
        return {test for test in lines if test in self.seconds and (line == 0 or lines[test] >> line & 1)}
