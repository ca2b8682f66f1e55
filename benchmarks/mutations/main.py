"""Random small mutations of the package, and the share of them that a test catches.

python benchmarks/mutations/main.py                            60 mutations of the whole package
python benchmarks/mutations/main.py --count 10 --seed 3 --folders trainer/loops
python benchmarks/mutations/main.py --root ../later --samples outputs/mutations/results.jsonl --output /tmp/later
                                                               the same mutations in another checkout, to compare

First each test runs once, and it is recorded which lines it runs. Then each mutation is shown to the tests that run its
line. A campaign that ended early goes on where it was, from the files in --output. Exits with 1 if fewer mutations are
caught than --at-least says.
"""

import argparse
import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from checkout import Checkout, working_copy
from choice import chosen_tests
from record import Record
from samples import Sample, draw, found_again, read_results

ROOT = Path(__file__).resolve().parents[2]
FILES_AT_ONCE = 12  # test files that are recorded in one process
FIRST_TESTS = 20  # most mutations are caught by one of so many
STARTING = 60.0  # seconds that a process may need before its first test
SLOWER = 8.0  # how much longer a test may last than in the record

T = TypeVar("T")


def shared_out(work: Callable[[Checkout, T], None], items: Iterable[T], checkouts: Sequence[Checkout]) -> None:
    """Do the work for each item, in as many threads as there are checkouts."""
    waiting = iter(list(items))
    lock = threading.Lock()

    def serve(checkout: Checkout) -> None:
        while True:
            with lock:
                item = next(waiting, None)
            if item is None:
                return
            work(checkout, item)

    with ThreadPoolExecutor(len(checkouts)) as pool:
        for finished in [pool.submit(serve, checkout) for checkout in checkouts]:
            finished.result()


def make_record(checkouts: Sequence[Checkout], folder: Path) -> None:
    """Run all tests once, and record which lines they run; what a folder holds already is kept."""
    files = checkouts[0].test_files()

    def record(checkout: Checkout, start: int) -> None:
        part = folder / f"{start:04}"
        if part.exists():
            return
        begun = folder / f"{start:04}.begun"
        shutil.rmtree(begun, ignore_errors=True)
        begun.mkdir(parents=True)
        end = checkout.failure(files[start : start + FILES_AT_ONCE], 3600.0, record=begun)
        begun.rename(part)
        print(f"recorded {start} to {start + FILES_AT_ONCE} of {len(files)} files; first failure: {end}", flush=True)

    shared_out(record, range(0, len(files), FILES_AT_ONCE), checkouts)


class Campaign:
    """Examines mutations, and writes what came of each as a line of JSON.

    Args:
        record: Which test runs which line.
        results: The file. Mutations that it holds are not examined again.
        count: Most tests for one mutation.
        seconds: Their longest duration, by the record.
    """

    def __init__(self, record: Record, results: Path, count: int, seconds: float) -> None:
        self.record = record
        self.results = results
        self.count = count
        self.seconds = seconds
        self.caught_by: dict[Sample, str] = {}
        self._lock = threading.Lock()
        if results.exists():
            for sample, caught_by in read_results(results):
                self.caught_by[sample] = caught_by

    def examine(self, checkout: Checkout, sample: Sample) -> None:
        """Run tests with a mutation until one fails."""
        if sample in self.caught_by:
            return
        start = time.monotonic()
        tests = chosen_tests(sample, self.record, checkout.folder, self.count, self.seconds)
        caught_by = ""
        with checkout.mutated(sample):
            for some in (tests[:FIRST_TESTS], tests[FIRST_TESTS:]):
                if some and not caught_by:
                    files = list(dict.fromkeys(test.partition("::")[0] for test in some))
                    limit = STARTING + SLOWER * sum(self.record.seconds[test] for test in some)
                    caught_by = checkout.failure(files, limit, some)
        outcome = {"caught_by": caught_by, "tests": len(tests), "seconds": round(time.monotonic() - start, 1)}
        line = json.dumps({"path": sample.path, "text": sample.text, **asdict(sample.mutation), **outcome})
        with self._lock, self.results.open("a") as file:
            file.write(line + "\n")
            self.caught_by[sample] = caught_by
        print(line, flush=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60, help="number of mutations (default: 60)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the draw (default: 1)")
    parser.add_argument("--folders", nargs="+", default=["."], help="folders of the package (default: the whole)")
    parser.add_argument("--samples", type=Path, help="examine the mutations of this file of results instead")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout (default: this one)")
    parser.add_argument("--output", type=Path, default=ROOT / "outputs/mutations", help="folder of record and results")
    parser.add_argument("--workers", type=int, default=2, help="mutations examined at once (default: 2)")
    parser.add_argument("--marks", default="not slow", help='marks that choose tests (default: "not slow")')
    parser.add_argument("--tests", type=int, default=250, help="most tests for one mutation (default: 250)")
    parser.add_argument("--seconds", type=float, default=90, help="their longest duration together (default: 90)")
    parser.add_argument("--timeout", type=float, default=120, help="longest duration of one test (default: 120)")
    parser.add_argument("--at-least", type=int, default=0, help="number of mutations to catch (default: 0)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    package = options.root.resolve() / "equipoise"
    if options.samples is None:
        samples = draw(package, options.folders, options.count, options.seed)
    else:
        again = [found_again(package, sample) for sample, _ in read_results(options.samples)]
        samples = [sample for sample in again if sample is not None]
        print(f"{len(again) - len(samples)} mutations are of code that is gone.")
    options.output.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        copies = [stack.enter_context(working_copy(package.parent)) for _ in range(options.workers)]
        checkouts = [stack.enter_context(Checkout(copy, options.marks, options.timeout)) for copy in copies]
        make_record(checkouts, options.output / "record")
        record = Record(options.output / "record", {sample.path for sample in samples})
        campaign = Campaign(record, options.output / "results.jsonl", options.tests, options.seconds)
        shared_out(campaign.examine, samples, checkouts)
    caught = sum(1 for sample in samples if campaign.caught_by[sample])
    print(f"{caught} of {len(samples)} mutations were caught (seed {options.seed}).")
    return 0 if caught >= options.at_least else 1


if __name__ == "__main__":
    sys.exit(main())
