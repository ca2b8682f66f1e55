"""Hundreds of runs with errors of allocators at random places: each must end as the undisturbed run, in time.

python benchmarks/oom_recovery/main.py                          300 cases on one process, 60 on two and three
python benchmarks/oom_recovery/main.py --first 17 --cases 1     one case again, by its number
"""

import argparse
import faulthandler
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from cases import Case, Outcome, draw, run
from rich.console import Console
from rich.table import Table
from torch import Tensor

from equipoise.parallel.communication.process_group import StoreServer, follows_from_another, joined
from equipoise.parallel.communication.rank import Rank
from equipoise.parallel.workers.launch import launch

TOLERANCE, LIMIT = 1e-12, 60.0
LOCAL = ("single_device", "dp", "balanced")
COLUMNS = ("strategy", "mode", "cases", "errors injected", "bit for bit", "largest difference", "slowest, s", "failed")


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Ends this process, telling where it is, if it takes too long."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def difference(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the size of the tensor."""
    return float((one - other).abs().max() / max(float(one.abs().max()), 1e-3))


def compare(case: Case, expected: Outcome, actual: Outcome) -> float:
    """The largest difference to the undisturbed run.

    Raises:
        AssertionError: If samples, steps, rates, logs, weights or gradients differ.
    """
    assert actual.seen == expected.seen, "samples were lost or doubled"
    assert (actual.steps, actual.rates) == (expected.steps, expected.rates), "steps or learning rates differ"
    assert actual.equal, "processes differ"
    assert actual.logged.keys() == expected.logged.keys(), "logged names differ"
    pairs = [(torch.tensor(expected.logged[name]), torch.tensor(value)) for name, value in actual.logged.items()]
    if case.masked:  # the mean of a log goes by the loss's weight
        pairs = [pair for name, pair in zip(actual.logged, pairs, strict=True) if name not in ("loss", "accuracy")]
    pairs += zip(expected.weights, actual.weights, strict=True)
    for one, other in zip(expected.gradients, actual.gradients, strict=True):
        pairs += zip(one, other, strict=True)
    largest = max(difference(one, other) for one, other in pairs)
    assert largest <= TOLERANCE, f"off by {largest:.1e}"
    return largest


def compare_bits(expected: Outcome, actual: Outcome) -> None:
    """The same to the bit, random generators included.

    Raises:
        AssertionError: If anything differs.
    """
    for one, other in zip(expected.weights, actual.weights, strict=True):
        assert torch.equal(one, other), "weights differ in bits"
    assert torch.equal(expected.random_state, actual.random_state), "the random generator is elsewhere"
    assert expected.logged == actual.logged, "logged values differ in bits"
    assert expected.seen == actual.seen, "samples were lost or doubled"


def check(case: Case, actual: Outcome) -> float:
    """Compares a run with injected errors with others; returns the largest difference to the undisturbed one."""
    if case.is_bitwise:
        compare_bits(run(case, "alike" if case.mode == "again" else "from the start"), actual)
    if case.dropout:  # parts draw other numbers than the whole, and a device's part others than the batch
        return 0.0
    return compare(case, run(case, "undisturbed"), actual)


def injected(case: Case) -> tuple[Outcome, float]:
    """A run with injected errors, and its seconds."""
    _quiet()
    begun = time.monotonic()
    with limit(LIMIT):
        return run(case, "injected"), time.monotonic() - begun


def in_group(cases: list[Case], port: int, processes: int, rank: int) -> list[tuple[Outcome, float]]:
    """Several runs in one group of processes, whose start would take longer than they do."""
    place = Rank(rank, rank, 0, processes, processes)
    with joined(place, torch.device("cpu"), timeout=timedelta(seconds=LIMIT), port=port):
        return [_of_all(*injected(case)) for case in cases]


def _of_all(outcome: Outcome, seconds: float) -> tuple[Outcome, float]:
    """An outcome with the errors of all processes."""
    events = torch.tensor(outcome.events)
    dist.all_reduce(events)
    return replace(outcome, events=int(events)), seconds


def outcomes(cases: list[Case]) -> Iterator[tuple[Case, Outcome | None, float, str]]:
    """All runs with injected errors, with what went wrong."""
    for case in (case for case in cases if case.strategy != "ddp"):
        try:
            yield case, *injected(case), ""
        except Exception as error:
            yield case, None, 0.0, f"{type(error).__name__}: {error}".splitlines()[0]
    for processes in (2, 3):
        together = [case for case in cases if case.strategy == "ddp" and case.devices == processes]
        for begin in range(0, len(together), 10):
            some, store = together[begin : begin + 10], StoreServer()
            try:
                work = partial(in_group, some, store.port, processes)
                found = launch(work, processes, is_consequence=follows_from_another)
            except Exception as error:
                seeds = f"one of {[case.seed for case in some]}"
                yield from ((case, None, 0.0, f"{seeds}: {error}".splitlines()[0]) for case in some)
            else:
                yield from ((case, *each, "") for case, each in zip(some, found, strict=True))


def campaign(cases: list[Case], console: Console) -> tuple[list[list[str]], int]:
    """Runs all cases; returns the rows of the table and how many failed."""
    rows: dict[tuple[str, str], Counter[str]] = {}
    for done, (case, outcome, seconds, error) in enumerate(outcomes(cases), 1):
        name = f"ddp, {case.devices} processes" if case.strategy == "ddp" else case.strategy
        row = rows.setdefault((name, case.mode), Counter())
        row["cases"] += 1
        try:
            assert outcome is not None, error
            with limit(LIMIT):
                row["largest"] = max(row["largest"], check(case, outcome))  # type: ignore[assignment]
            row["events"] += outcome.events
            row["bits"] += case.is_bitwise
        except Exception as wrong:
            row["failed"] += 1
            console.print(f"Case {case.seed} failed: {wrong}\n{case}")
        row["seconds"] = max(row["seconds"], seconds)  # type: ignore[assignment]
        print(f"\r{done} of {len(cases)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    names = ("cases", "events", "bits", "largest", "seconds", "failed")
    formats = {"largest": ".1e", "seconds": ".1f"}
    table = [[*key, *(format(row[name], formats.get(name, "")) for name in names)] for key, row in sorted(rows.items())]
    return table, sum(row["failed"] for row in rows.values())


def _quiet() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)


def main(command: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300, help="on one process (default: 300)")
    parser.add_argument("--ddp", type=int, default=60, help="on two and three processes (default: 60)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case (default: 0)")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    options = parser.parse_args(command)
    _quiet()
    begun, console = time.monotonic(), Console()
    console.width = max(console.width, 120)
    cases = [draw(options.first + number, LOCAL) for number in range(options.cases)]
    cases += [draw(options.first + number, ("ddp",)) for number in range(options.ddp)]
    rows, failed = campaign(cases, console)
    table = Table(*COLUMNS)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(f"{len(cases)} cases in {time.monotonic() - begun:.0f} s, {failed} failed.")
    if options.markdown:
        lines = [list(COLUMNS), ["---"] * len(COLUMNS), *rows]
        options.markdown.write_text("".join(f"| {' | '.join(line)} |\n" for line in lines))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
