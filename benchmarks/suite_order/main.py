"""Runs of the suite in random order, on request beside other work: tests must pass in any order.

python benchmarks/suite_order/main.py --runs 10 --busy 4 --busy-runs 5     the campaign, some hours
python benchmarks/suite_order/main.py --runs 10 --marks "not slow"           what `make test` runs
python benchmarks/suite_order/main.py --runs 20 --shift-seeds tests/trainer  with other data and weights in each run
python benchmarks/suite_order/main.py --runs 3 tests/trainer               a part of the suite
python benchmarks/suite_order/main.py --runs 1 --seed 1234                 an order again

Exits with 1 if a test failed or a run did not finish.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = ("run", "seed", "busy processes", "passed", "failed", "skipped", "minutes", "end")

# A busy process ends when the campaign does, however that ends.
BUSY = """
import os
parent = os.getppid()
while os.getppid() == parent:
    sum(range(1_000_000))
"""


@dataclass(frozen=True)
class Outcome:
    """End of one run of the suite.

    Attributes:
        seed: The seed of the order and of the hypotheses.
        busy: Number of busy processes beside it.
        passed: Number of tests that passed.
        skipped: Number of tests that were skipped.
        failing: The tests that failed, or whose fixtures did.
        seconds: Duration of the run.
        end: "finished", or what ended it before it had a result.
    """

    seed: int
    busy: int
    passed: int
    skipped: int
    failing: tuple[str, ...]
    seconds: float
    end: str

    @property
    def succeeded(self) -> bool:
        return self.end == "finished" and not self.failing

    def row(self, number: int) -> tuple[str, ...]:
        figures = (number, self.seed, self.busy, self.passed, len(self.failing), self.skipped)
        return (*map(str, figures), f"{self.seconds / 60:.1f}", self.end)


@contextmanager
def busy_processes(count: int) -> Iterator[list[int]]:
    """Keep as many processes computing, and end them afterwards."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            processes.append(subprocess.Popen([sys.executable, "-c", BUSY]))
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def command(seed: int, workers: int, report: Path, tests: Sequence[str], marks: str = "") -> list[str]:
    """Return the command of one run."""
    order = ["--random-order-bucket=global", f"--random-order-seed={seed}", f"--hypothesis-seed={seed}"]
    parallel = ["-n", str(workers)] if workers else []
    options = ["-p", "no:cacheprovider", f"--junitxml={report}"]
    chosen = ["-m", marks] if marks else []
    return [sys.executable, "-m", "pytest", *options, *order, *parallel, *chosen, *tests]


def environment(shift: int) -> dict[str, str]:
    """Return the variables of a run, whose tests set other seeds if the shift is not 0."""
    if shift == 0:
        return dict(os.environ)
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "SEED_SHIFT": str(shift),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTEST_ADDOPTS": "-p shifted_seeds",  # the plugin beside this file
    }


def run_once(
    seed: int,
    busy: int,
    workers: int,
    seconds: float,
    logs: Path,
    tests: Sequence[str],
    *,
    marks: str = "",
    shift: int = 0,
) -> Outcome:
    """Run the suite once in the order of a seed.

    Args:
        seed: The seed.
        busy: Number of busy processes beside it.
        workers: Number of processes of pytest-xdist; 0: without it.
        seconds: Time after which the run is ended.
        logs: The folder that the output and the results are written to.
        tests: Files or folders; none: the whole suite.
        marks: An expression of marks that chooses among these tests. Default: all.
        shift: A number that is added to every seed that a test sets. Default: 0.
    """
    report = logs / f"{seed}.xml"
    start = time.monotonic()
    with (logs / f"{seed}.log").open("wb") as log, busy_processes(busy):
        process = subprocess.Popen(
            command(seed, workers, report, tests, marks),
            cwd=ROOT,
            env=environment(shift),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        end = wait_or_end(process, seconds)
    passed, skipped, failing = read_report(report)
    return Outcome(seed, busy, passed, skipped, tuple(failing), time.monotonic() - start, end)


def wait_or_end(process: "subprocess.Popen[bytes]", seconds: float) -> str:
    """Wait for a run; end it with all it has started when its time is up or the campaign is interrupted."""
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"not finished in {seconds / 60:.0f} minutes"
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code in (0, 1):  # all passed, or some failed
        return "finished"
    return f"pytest left with exit code {code}"


def read_report(report: Path) -> tuple[int, int, dict[str, str]]:
    """Return the numbers of passed and skipped tests, and of those that failed the messages by their names."""
    if not report.exists():
        return 0, 0, {}
    passed = skipped = 0
    failing: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        results = {child.tag: child.get("message", "") for child in case}
        if "failure" in results or "error" in results:
            name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
            failing[name] = results.get("failure") or results.get("error", "")
        elif "skipped" in results:
            skipped += 1
        else:
            passed += 1
    return passed, skipped, failing


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    shown = Table(*columns, title=title)
    for row in rows:
        shown.add_row(*row)
    return shown


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", help="files or folders of tests (default: the whole suite)")
    parser.add_argument("--runs", type=int, default=10, help="number of runs (default: 10)")
    parser.add_argument("--busy", type=int, default=0, help="busy processes beside the last runs (default: 0)")
    parser.add_argument("--busy-runs", type=int, help="number of runs that have them (default: all)")
    parser.add_argument("--seed", type=int, help="seed of the first run; the others count on (default: drawn)")
    parser.add_argument("--workers", type=int, default=2, help="processes of pytest-xdist; 0: without (default: 2)")
    parser.add_argument("--marks", default="", help='marks that choose tests, such as "not slow" (default: all tests)')
    parser.add_argument(
        "--shift-seeds", action="store_true", help="add the number of the run to every seed that a test sets"
    )
    parser.add_argument("--minutes", type=float, default=120.0, help="longest duration of a run (default: 120)")
    parser.add_argument("--logs", type=Path, help="folder for the runs' output (default: a temporary one)")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    first = random.SystemRandom().randrange(1_000_000) if options.seed is None else options.seed
    busy_runs = options.runs if options.busy_runs is None else options.busy_runs
    logs = Path(tempfile.mkdtemp(prefix="suite_order-")) if options.logs is None else options.logs
    logs = logs.resolve()
    logs.mkdir(parents=True, exist_ok=True)

    outcomes: list[Outcome] = []
    for index in range(options.runs):
        busy = options.busy if index >= options.runs - busy_runs else 0
        print(f"run {index + 1} of {options.runs}: --random-order-seed={first + index}, {busy} busy", flush=True)
        limit = options.minutes * 60
        outcomes.append(run_once(first + index, busy, options.workers, limit, logs, options.tests, marks=options.marks))
        print(", ".join(outcomes[-1].row(index + 1)), flush=True)

    console = Console()
    rows = [outcome.row(index) for index, outcome in enumerate(outcomes, 1)]
    console.print(table("The suite in random order", COLUMNS, rows))
    failures = Counter(name for outcome in outcomes for name in outcome.failing)
    for name, count in failures.most_common():
        print(f"failed in {count} of {options.runs} runs: {name}")  # not in a table, which would break long names
    if options.markdown is not None:
        options.markdown.write_text(markdown(COLUMNS, rows))
    print(f"The output of each run lies in {logs}")
    return 0 if all(outcome.succeeded for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
