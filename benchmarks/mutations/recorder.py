"""Notes which lines of the package each test runs, and how long it takes."""

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import pytest
from coverage import Coverage

__all__ = ["Recorder"]

COLLECTION = ""  # the name of what runs before the first test
_here: list["Recorder"] = []  # the recorder of this process


class Recorder:
    """A plugin of pytest that notes the lines which each test runs, in the processes that it starts as well.

    Processes that are killed, and interpreters that are started anew, leave no note.

    Args:
        package: The folder whose files are noted.
        folder: Each process writes a file there: a line of JSON for each test, the last one with all arcs.
    """

    def __init__(self, package: str, folder: str, test: str = COLLECTION) -> None:
        self.package = package
        self.folder = folder
        self.test = test
        self.failed = False
        self.coverage = Coverage(data_file=None, branch=True, include=[f"{package}/*"], config_file=False)
        self.coverage.set_option("run:disable_warnings", ["no-data-collected"])
        self.arcs: dict[str, set[tuple[int, int]]] = defaultdict(set)
        prepare, leave = spawn.get_preparation_data, os._exit

        def prepare_and_record(name: str) -> dict[str, Any]:
            return {**prepare(name), "recorder": _Stowaway(self)}

        def note_and_leave(status: int) -> None:
            self.note()
            self.close()
            leave(status)

        spawn.get_preparation_data = prepare_and_record
        os._exit = note_and_leave  # type: ignore[assignment]
        _here.append(self)
        self.coverage.start()

    def note(self, **more: object) -> None:
        """Write what has run since the last note, as lines of the test; the set of lines as the bits of a number."""
        data = self.coverage.get_data()
        lines: dict[str, str] = {}
        for file in data.measured_files():
            arcs = data.arcs(file) or []
            path = os.path.relpath(file, self.package)
            self.arcs[path].update(arcs)
            lines[path] = hex(sum(1 << line for line in data.lines(file) or []))
        data.erase()
        self._write({"test": self.test, "lines": lines, **more})

    def close(self) -> None:
        self._write({"arcs": {path: sorted(arcs) for path, arcs in self.arcs.items()}})
        self.arcs.clear()

    def _write(self, entry: dict[str, object]) -> None:
        with Path(self.folder, f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def pytest_collection_finish(self) -> None:
        self.note()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.test, self.failed = item.nodeid, False
        start = time.perf_counter()
        result = yield
        self.note(seconds=time.perf_counter() - start, failed=self.failed)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed = self.failed or report.failed


class _Stowaway:
    """Starts the recorder of a new process, which receives it with multiprocessing's own data."""

    def __init__(self, recorder: Recorder) -> None:
        self.arguments = (recorder.package, recorder.folder, recorder.test)

    def __reduce__(self) -> tuple[object, ...]:
        return _come_along, self.arguments


def _come_along(package: str, folder: str, test: str) -> None:
    if _here:  # a fork of a process with a recorder
        (recorder,) = _here
        recorder.coverage.get_data().erase()
        recorder.test = test
    else:
        Recorder(package, folder, test)
