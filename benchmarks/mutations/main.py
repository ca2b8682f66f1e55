"""Random small mutations of the package, and the share of them that a test catches.

python benchmarks/mutations/main.py                            60 mutations of trainer, parallel, strategies, pipeline
python benchmarks/mutations/main.py --count 10 --seed 3 --folders trainer/loops
python benchmarks/mutations/main.py --root ../earlier          of another checkout, to compare

The tests must pass without a mutation. Exits with 1 if fewer mutations are caught than --at-least says.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from operators import Mutation, mutations_of

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("trainer", "parallel", "strategies", "pipeline")
# Folders whose tests run whole trainings; the last to look for a mutation.
WIDE = ("trainer", "parity", "strategies", "pipeline", "callbacks")
COLUMNS = ("file", "line", "before", "after", "caught by", "seconds")
MOST_CHARACTERS = 60


@dataclass(frozen=True)
class Sample:
    """A mutation of a file.

    Attributes:
        path: The file, relative to the package.
        mutation: The mutation.
    """

    path: Path
    mutation: Mutation


@dataclass(frozen=True)
class Outcome:
    """Verdict of the tests about a mutation.

    Attributes:
        sample: The mutation.
        caught_by: The tests that ran when it was caught; empty if none caught it.
        seconds: Duration of all test runs.
    """

    sample: Sample
    caught_by: str
    seconds: float

    def row(self) -> tuple[str, ...]:
        mutation = self.sample.mutation
        caught_by = self.caught_by or "nothing"
        texts = (_short(mutation.before), _short(mutation.after), caught_by)
        return (str(self.sample.path), str(mutation.line), *texts, f"{self.seconds:.0f}")


def _short(text: str) -> str:
    line = " ".join(text.split()).replace("|", "\\|")
    return line if len(line) <= MOST_CHARACTERS else line[:MOST_CHARACTERS] + " ..."


def draw(package: Path, folders: Sequence[str], count: int, seed: int) -> list[Sample]:
    """Draw mutations, every possible one as likely as every other.

    Args:
        package: The folder of the package.
        folders: Its folders whose files are mutated.
        count: Number of mutations.
        seed: Seed of the draw.
    """
    candidates: list[Sample] = []
    for folder in folders:
        for path in sorted((package / folder).rglob("*.py")):
            for mutation in mutations_of(path.read_text()):
                candidates.append(Sample(path.relative_to(package), mutation))
    return random.Random(seed).sample(candidates, min(count, len(candidates)))


@contextmanager
def working_copy(root: Path) -> Iterator[Path]:
    """Copy a checkout without its environment and outputs, and remove the copy afterwards."""
    ignored = shutil.ignore_patterns(".git", ".venv", "outputs", "multirun", "__pycache__", ".*_cache", ".hypothesis")
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copy = Path(folder) / "checkout"
        shutil.copytree(root, copy, ignore=ignored, symlinks=True)
        yield copy


def stages(checkout: Path, path: Path) -> Iterator[list[str]]:
    """Yield groups of tests that may catch a mutation, the nearest first.

    Args:
        checkout: The checkout.
        path: The mutated file, relative to the package.
    """
    tests = checkout / "tests"
    # 1. The test files that mirror the file or import it.
    module = ".".join(("equipoise", *path.with_suffix("").parts))
    near = [tests / path.parent / f"test_{path.name}"]
    for file in sorted(tests.rglob("test_*.py")):
        if module in file.read_text():
            near.append(file)
    existing = [str(file.relative_to(checkout)) for file in dict.fromkeys(near) if file.exists()]
    if existing:
        yield existing
    # 2. The folders that mirror its folder, from within to without.
    folder = tests / path.parent
    while folder != tests:
        if folder.is_dir():
            yield [str(folder.relative_to(checkout))]
        folder = folder.parent
    # 3. All that train.
    for name in WIDE:
        if name != path.parts[0] and (tests / name).is_dir():
            yield [f"tests/{name}"]


def tests_pass(checkout: Path, tests: Sequence[str], marks: str, seconds: float) -> bool:
    """Return True if tests pass in time; a mutation may also make them hang.

    Args:
        checkout: The checkout.
        tests: Files or folders.
        marks: An expression of marks that chooses among them.
        seconds: Time after which the run counts as hung.
    """
    options = ["-x", "-q", "-p", "no:cacheprovider", "--timeout", str(int(seconds))]
    if marks:
        options += ["-m", marks]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    process = subprocess.Popen(
        command,
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    finally:
        # Also the workers of a run that hangs.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    # 5: no test was selected.
    return code in (0, 5)


def examine(sample: Sample, checkout: Path, marks: str, seconds: float) -> Outcome:
    """Mutate a file of a checkout, run tests until one fails, and restore the file."""
    start = time.monotonic()
    file = checkout / "equipoise" / sample.path
    source = file.read_text()
    file.write_text(sample.mutation.apply(source))
    caught_by = ""
    try:
        for tests in stages(checkout, sample.path):
            if not tests_pass(checkout, tests, marks, seconds):
                caught_by = " ".join(tests)
                break
    finally:
        file.write_text(source)
    return Outcome(sample, caught_by, time.monotonic() - start)


class Campaign:
    """Examines mutations, as many at once as there are checkouts.

    Args:
        marks: An expression of marks that chooses among the tests.
        seconds: Time after which a run of tests counts as hung.
    """

    def __init__(self, marks: str, seconds: float) -> None:
        self.marks = marks
        self.seconds = seconds
        self.outcomes: list[Outcome] = []
        self._lock = threading.Lock()

    def run(self, samples: Mapping[int, Sample], checkouts: Sequence[Path]) -> None:
        """Examine samples, by their numbers in the draw."""
        waiting = list(reversed(samples.items()))

        def work(checkout: Path) -> None:
            while True:
                with self._lock:
                    if not waiting:
                        return
                    number, sample = waiting.pop()
                outcome = examine(sample, checkout, self.marks, self.seconds)
                with self._lock:
                    self.outcomes.append(outcome)
                    print(f"mutation {number}: " + ", ".join(outcome.row()), flush=True)

        with ThreadPoolExecutor(len(checkouts)) as pool:
            for finished in [pool.submit(work, checkout) for checkout in checkouts]:
                finished.result()

    @property
    def caught(self) -> int:
        """Number of mutations that a test has caught."""
        return sum(1 for outcome in self.outcomes if outcome.caught_by)


def markdown(outcomes: Sequence[Outcome]) -> str:
    """Return the mutations that nothing caught as a table."""
    rows = [outcome.row() for outcome in outcomes if not outcome.caught_by]
    lines = [COLUMNS, ["---"] * len(COLUMNS), *sorted(rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60, help="number of mutations (default: 60)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the draw (default: 1)")
    parser.add_argument("--first", type=int, default=1, help="first of the drawn mutations to examine (default: 1)")
    parser.add_argument("--last", type=int, help="last of them (default: all that are drawn)")
    parser.add_argument("--folders", nargs="+", default=FOLDERS, help="folders of the package (default: four)")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout (default: this one)")
    parser.add_argument("--workers", type=int, default=2, help="mutations examined at once (default: 2)")
    parser.add_argument("--marks", default="not slow", help='marks that choose tests (default: "not slow")')
    parser.add_argument("--minutes", type=float, default=10.0, help="longest run of one group of tests (default: 10)")
    parser.add_argument("--at-least", type=int, default=0, help="number of mutations to catch (default: 0)")
    parser.add_argument("--markdown", type=Path, help="write the mutations that nothing caught there")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    root = options.root.resolve()
    drawn = draw(root / "equipoise", options.folders, options.count, options.seed)
    samples = dict(list(enumerate(drawn, 1))[options.first - 1 : options.last])
    campaign = Campaign(options.marks, options.minutes * 60)
    with ExitStack() as copies:
        checkouts = [copies.enter_context(working_copy(root)) for _ in range(options.workers)]
        campaign.run(samples, checkouts)
    print(f"{campaign.caught} of {len(samples)} mutations were caught (seed {options.seed}).")
    if options.markdown is not None:
        options.markdown.write_text(markdown(campaign.outcomes))
    return 0 if campaign.caught >= options.at_least else 1


if __name__ == "__main__":
    sys.exit(main())
