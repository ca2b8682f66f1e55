"""Kills random training programs at random moments, resumes them, and compares them with undisturbed runs to the bit.

python benchmarks/kills/main.py                                         100, 48, 30, 30, 20 and 20 programs, by mode
python benchmarks/kills/main.py --modes persistent --first 17 --cases 1 one program again, by its number
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from attempts import Outcome, killed_and_resumed, undisturbed
from programs import MODES, Case, draw
from rich.console import Console
from rich.table import Table

__all__ = ["compare", "main"]

CASES = {"persistent": 100, "single": 48, "ddp": 30, "uneven": 30, "pipeline": 20, "replicas": 20}
LIMITS = {"persistent": 120.0, "single": 120.0, "ddp": 400.0, "uneven": 400.0, "pipeline": 400.0, "replicas": 400.0}
COLUMNS = ("mode", "programs", "kills", "not killed in time", "equal to the bit", "failed", "seconds")


@dataclass
class Tally:
    """Counts of how the programs of a mode ended."""

    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


def compare(expected: Outcome, actual: Outcome) -> None:
    """Compares a run with the undisturbed one, to the bit.

    Raises:
        AssertionError: Naming the first difference.
    """
    difference = _difference(expected.seen, actual.seen, "samples")
    difference = difference or _difference(expected.values, actual.values, "")
    if not difference and actual.rows != expected.rows:
        lines = zip(expected.rows.splitlines(), actual.rows.splitlines(), strict=False)
        first = next((number for number, (one, other) in enumerate(lines) if one != other), -1)
        difference = f"metrics.csv from line {first}: {actual.rows.splitlines()[first]!r}"
    assert not difference, difference


def _difference(expected: Any, actual: Any, place: str) -> str:
    """The first place where two nested values differ; empty if there is none."""
    if place == "/calls":
        return ""
    if isinstance(expected, dict) and isinstance(actual, dict):
        if expected.keys() != actual.keys():
            return f"{place}: other keys: {sorted(map(str, expected.keys() ^ actual.keys()))[:8]}"
        pairs = ((_difference(expected[key], actual[key], f"{place}/{key}")) for key in expected)
        return next(filter(None, pairs), "")
    if isinstance(expected, list) and isinstance(actual, list):
        if len(expected) != len(actual):
            return f"{place}: {len(actual)} values for {len(expected)}"
        pairs = (_difference(one, other, f"{place}/{i}") for i, (one, other) in enumerate(zip(expected, actual)))  # noqa: B905
        return next(filter(None, pairs), "")
    if isinstance(expected, torch.Tensor) and isinstance(actual, torch.Tensor):
        is_equal = expected.dtype == actual.dtype and torch.equal(expected, actual)
    else:
        is_equal = expected == actual or (expected != expected and actual != actual)  # NaN is equal to NaN here
    return "" if is_equal else f"{place}: {actual!r} for {expected!r}"


def run(case: Case, folder: Path, tally: Tally) -> str:
    """Runs a program undisturbed, then killed and resumed; returns what was wrong, or nothing."""
    start = time.monotonic()
    tally.counts["programs"] += 1
    wrong = ""
    try:
        limit = LIMITS[case.mode]
        expected = undisturbed(case, folder / "undisturbed", limit)
        actual = killed_and_resumed(case, folder / "resumed", expected.calls, limit)
        tally.counts["kills"] += actual.kills
        tally.counts["not killed in time"] += actual.kills == 0
        compare(expected, actual)
        tally.counts["equal to the bit"] += 1
    except AssertionError as error:
        tally.counts["failed"] += 1
        wrong = str(error)
    tally.seconds += time.monotonic() - start
    return wrong


def main(arguments: list[str] | None = None) -> int:
    """Runs the campaign, prints a table, and returns the exit code: 1 if a program failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(CASES))
    parser.add_argument("--cases", type=int, help="programs of each mode")
    parser.add_argument("--first", type=int, default=0, help="the number of the first program")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no program after so many minutes")
    parser.add_argument("--keep", action="store_true", help="keep the files of programs that failed")
    chosen = parser.parse_args(arguments)
    end = time.monotonic() + 60 * chosen.minutes
    tallies = {mode: Tally() for mode in chosen.modes}
    console = Console()
    torch.set_num_threads(1)  # processes are forked, and threads do not survive that
    root = Path(tempfile.mkdtemp(prefix="kills-"))
    for mode, tally in tallies.items():
        for seed in range(chosen.first, chosen.first + (chosen.cases or CASES[mode])):
            if time.monotonic() > end:
                console.print(f"{mode}: out of time before program {seed}")
                break
            folder = root / f"{mode}-{seed}"
            wrong = run(draw(seed, mode), folder, tally)
            if wrong:
                console.print(f"{mode} {seed} failed: {wrong[-2000:]}", markup=False)
            if not (wrong and chosen.keep):
                shutil.rmtree(folder, ignore_errors=True)
    if not chosen.keep:
        shutil.rmtree(root, ignore_errors=True)
    _print(console, tallies)
    return int(any(tally.counts["failed"] for tally in tallies.values()))


def _print(console: Console, tallies: dict[str, Tally]) -> None:
    table = Table(*COLUMNS)
    for mode, tally in tallies.items():
        table.add_row(mode, *(str(tally.counts[name]) for name in COLUMNS[1:-1]), f"{tally.seconds:.0f}")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
