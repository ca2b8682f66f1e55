"""The tests but the slow ones, and one command for each feature, with each promised combination of Python and torch.

python -m benchmarks.versions                           all rows, about a quarter of an hour each
python -m benchmarks.versions py3.12-torch2.11.0        one row
python -m benchmarks.versions oldest --tests tests/app  a part of the tests
python -m benchmarks.versions oldest --quick            the tests of `make test`, as in continuous integration
python -m benchmarks.versions --list                    the rows

Environments lie side by side in .versions/ and are kept. Exits with 1 if a test or a command failed. A row whose
environment cannot be built counts as not run; the last lines name it.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from benchmarks.suite_order.main import markdown, read_report, wait_or_end
from benchmarks.versions.environments import ROOT, NotAvailable, NotBuildable, build, python_of
from benchmarks.versions.rows import FEATURES, ROWS, Row, rows_named

COLUMNS = ("Python", "torch", "other packages", "passed", "failed", "skipped", "minutes", "commands")
# Names of the packages that a row's table shows, besides torch.
SHOWN = ("lightning", "torchmetrics", "hydra-core", "numpy", "rich")


@dataclass
class Outcome:
    """The result of a row.

    Attributes:
        row: The row.
        not_run: The reason why it was not run; empty if it was.
        passed: Number of tests that passed.
        skipped: Number of tests that were skipped.
        failing: Tests that failed, and the commands that did.
        minutes: Duration of the tests.
        versions: Versions of the packages, by name.
        end: "finished", or what ended the tests before they had a result.
    """

    row: Row
    not_run: str = ""
    passed: int = 0
    skipped: int = 0
    failing: tuple[str, ...] = ()
    failing_commands: tuple[str, ...] = ()
    minutes: float = 0.0
    versions: dict[str, str] | None = None
    end: str = "finished"

    @property
    def has_failed(self) -> bool:
        return bool(self.failing or self.failing_commands) or self.end != "finished"

    def cells(self) -> tuple[str, ...]:
        """Return the line of the table."""
        versions = self.versions or {}
        others = ", ".join(f"{name} {versions[name]}" for name in SHOWN if name in versions)
        commands = "all" if not self.failing_commands else "failed: " + ", ".join(self.failing_commands)
        counts = (str(self.passed), str(len(self.failing)), str(self.skipped), f"{self.minutes:.1f}")
        if self.not_run:
            counts = ("not run", "", "", "")
            commands = ""
        torch = versions.get("torch", self.row.packages.get("torch", ""))
        return (versions.get("python", self.row.python), torch, others, *counts, commands)


def run_row(
    row: Row, environments: Path, tests: Sequence[str], processes: int, seconds: float, *, quick: bool = False
) -> Outcome:
    """Build the environment of a row, and run the tests and commands in it.

    Args:
        row: The row.
        environments: The folder of all environments.
        tests: Files or folders of tests; none: all.
        processes: Number of processes of pytest-xdist.
        seconds: Time after which the tests are ended.
        quick: Leave out tests that take half a second or more, as `make test` does. Default: False.
    """
    folder = environments / row.name
    try:
        build(row, folder)
    except NotAvailable as error:
        return Outcome(row, not_run=f"{row.name} could not be installed: {error}")
    except NotBuildable as error:
        return Outcome(row, end=f"not built: {error}")
    outcome = Outcome(row, versions=_versions(folder))
    _run_commands(folder, outcome)
    _run_tests(folder, outcome, tests, processes, seconds, quick=quick)
    return outcome


def _versions(folder: Path) -> dict[str, str]:
    """Return the versions of Python and of the packages of an environment."""
    names = ("torch", *SHOWN)
    code = (
        "import json, platform, importlib.metadata as m;"
        f"print(json.dumps({{'python': platform.python_version(), **{{n: m.version(n) for n in {names!r}}}}}))"
    )
    output = subprocess.run([python_of(folder), "-c", code], capture_output=True, text=True, check=True).stdout
    versions: dict[str, str] = json.loads(output)
    return versions


def _run_commands(folder: Path, outcome: Outcome) -> None:
    """Run a command for each feature in an empty folder, as a user does."""
    failed = []
    command = python_of(folder).with_name("equipoise")
    for feature, arguments in FEATURES.items():
        log = folder / f"{re.sub('[^a-z]+', '_', feature)}.log"
        with tempfile.TemporaryDirectory() as place, log.open("wb") as output:
            process = subprocess.Popen(
                [command, *arguments],
                cwd=place,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            end = wait_or_end(process, seconds=300.0)
            is_reported = arguments != ("fit",) or any(Path(place).glob("outputs/*/*/report.html"))
        if process.returncode or end != "finished" or not is_reported:
            failed.append(feature)
            print(f"{outcome.row.name}: {feature} failed, see {log}", flush=True)
    outcome.failing_commands = tuple(failed)


def _run_tests(
    folder: Path, outcome: Outcome, tests: Sequence[str], processes: int, seconds: float, *, quick: bool
) -> None:
    """Run the tests but the slow ones, whose lines go to a log and whose result comes from pytest's report."""
    report = folder / "tests.xml"
    report.unlink(missing_ok=True)
    options = ["-n", str(processes), "--dist", "worksteal"] if processes else []
    chosen = "not slow and not thorough" if quick else "not slow"
    command = [str(python_of(folder)), "-m", "pytest", "-p", "no:cacheprovider", "-m", chosen]
    command += [*options, f"--junitxml={report}", *tests]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    start = time.monotonic()
    with (folder / "tests.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        outcome.end = wait_or_end(process, seconds)
    outcome.minutes = (time.monotonic() - start) / 60
    outcome.passed, outcome.skipped, failing = read_report(report)
    outcome.failing = tuple(failing)
    for name, message in islice(failing.items(), 20):
        # What remains of a run elsewhere is its output.
        print(f"{outcome.row.name}: {name} failed: {message[:400]}", flush=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    promised = [row.name for row in ROWS if row.name != "newest"]
    parser.add_argument("rows", nargs="*", default=promised, help="names of rows (default: all but newest)")
    parser.add_argument("--list", action="store_true", help="print the rows")
    parser.add_argument("--tests", nargs="+", default=[], help="files or folders of tests (default: all)")
    parser.add_argument("--quick", action="store_true", help="leave out tests that take half a second or more")
    parser.add_argument("--processes", type=int, default=2, help="processes of pytest-xdist; 0: without (default: 2)")
    parser.add_argument("--minutes", type=float, default=40.0, help="longest duration of a row's tests (default: 40)")
    parser.add_argument(
        "--environments", type=Path, default=ROOT / ".versions", help="their folder (default: .versions)"
    )
    parser.add_argument("--markdown", type=Path, help="write the table there")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.list:
        for row in ROWS:
            print(row.name)
        return 0
    environments = options.environments.resolve()
    outcomes = []
    for row in rows_named(options.rows):
        print(f"{row.name}: building its environment, then the commands and tests", flush=True)
        seconds = options.minutes * 60
        outcomes.append(run_row(row, environments, options.tests, options.processes, seconds, quick=options.quick))
        print(f"{row.name}: {', '.join(outcomes[-1].cells())}", flush=True)
    return _report(outcomes, options.markdown)


def _report(outcomes: Sequence[Outcome], path: Path | None) -> int:
    """Print the table and what was not run. Return the exit code."""
    table = markdown(COLUMNS, [outcome.cells() for outcome in outcomes])
    print(table, end="")
    if path is not None:
        path.write_text(table)
    passed = sum(outcome.passed for outcome in outcomes)
    skipped = sum(outcome.skipped for outcome in outcomes)
    failed = sum(len(outcome.failing) + len(outcome.failing_commands) for outcome in outcomes)
    for outcome in outcomes:
        if outcome.end != "finished":
            print(f"{outcome.row.name}: {outcome.end}")
        if outcome.not_run:
            print(f"not run: {outcome.not_run}")
    print(f"versions: {passed} passed, {failed} failed, {skipped} skipped")
    return int(any(outcome.has_failed for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
