"""Show on one GPU what Equipoise promises of GPUs: tests, and fourteen measurements. At most nine minutes.

python -m benchmarks.gpu                        all items; the table on the screen
python -m benchmarks.gpu --out gpu.json         also in a file
python -m benchmarks.gpu --items 2 9            some items
python -m benchmarks.gpu --simulated            on simulated devices: does the command itself work?
python -m benchmarks.gpu --patience 3           on a machine that is slow, or busy: three times the time
"""

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.campaign import ITEMS, SECONDS, Item, Outcome, Row, run_item, write_row, write_skipped

__all__: list[str] = []


def main(command: list[str] | None = None) -> int:
    """Run the campaign, or one item of it as a child process.

    Returns:
        0; 1 if something failed, or a bound is broken.
    """
    options = parse(command)
    if options.child is not None:
        run_child(options)
        return 0
    begun = time.monotonic()
    outcomes = []
    for item in chosen_items(options.items):
        print(f"{item.number:>2}  {item.name} ...", file=sys.stderr, flush=True)
        item = replace(item, limit=item.limit * options.patience)
        seconds_left = SECONDS * options.patience - (time.monotonic() - begun)
        outcomes.append(run_item(item, further_options(options), seconds_left))
        seconds = time.monotonic() - begun
        # After each item: a campaign that is ended keeps what it has found.
        if options.out is not None:
            write(options.out, outcomes, seconds, is_simulated=options.simulated)
    show(outcomes, time.monotonic() - begun, is_simulated=options.simulated)
    return int(not all(outcome.is_good for outcome in outcomes))


def parse(command: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = [item.number for item in ITEMS]
    parser.add_argument("--items", type=int, nargs="+", choices=numbers, default=numbers, help="default: all")
    parser.add_argument("--out", type=Path, help="write the results there, as JSON")
    parser.add_argument("--patience", type=float, default=1.0, help="factor of all limits of time (default: 1)")
    parser.add_argument("--small", action="store_true", help="small sizes, whose times mean nothing")
    parser.add_argument("--simulated", action="store_true", help="on simulated devices, with small sizes")
    parser.add_argument("--child", type=int, choices=numbers, help=argparse.SUPPRESS)
    parser.add_argument("--killed-in", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(command)


def chosen_items(numbers: list[int]) -> list[Item]:
    """Return the items with these numbers, in their order."""
    return [item for item in ITEMS if item.number in numbers]


def further_options(options: argparse.Namespace) -> list[str]:
    """Return what a child process must be told."""
    flags = {"--small": options.small, "--simulated": options.simulated}
    return [flag for flag, is_set in flags.items() if is_set]


# The child process


def run_child(options: argparse.Namespace) -> None:
    """Run one item, and write its rows into a file as they come."""
    if options.simulated:
        # Before torch is imported.
        installation = importlib.import_module("tests.simulated.devices.installation")
        installation.install()
        installation.install_in_workers()
    from benchmarks.gpu.measuring import Setting

    (item,) = chosen_items([options.child])
    setting = Setting.find(is_small=options.small, is_simulated=options.simulated)
    if options.killed_in is not None:
        importlib.import_module("benchmarks.gpu.checkpoints").be_killed(setting, options.killed_in)
        return
    if item.needs_cuda and not setting.has_cuda:
        write_skipped(options.out, "needs a CUDA device")
        return
    module, _, name = item.function.partition(":")
    rows: Callable[[Any], Iterator[Row]] = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), name)
    for row in rows(setting):
        if row.is_time and setting.is_small:
            row = row.unjudged()
        write_row(options.out, row)


# Results


def show(outcomes: list[Outcome], seconds: float, *, is_simulated: bool) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    console.width = max(console.width, 160)
    title = "On simulated devices: times and ratios of times mean nothing" if is_simulated else None
    table = Table("", "item", "what", "value", "bound", "kept", title=title)
    for outcome in outcomes:
        table.add_section()
        number = str(outcome.item.number)
        table.add_row(number, outcome.item.name, f"{outcome.seconds:.0f} s", "", "", "")
        for row in outcome.rows:
            table.add_row("", "", escape(row.what), escape(value_of(row)), row.bound, verdict_of(row.is_kept))
        if outcome.problem:
            word = "skipped" if outcome.is_skipped else "FAILED"
            table.add_row("", "", escape(outcome.problem), word, "", "" if outcome.is_skipped else "no")
    console.print(table)
    failed = [str(outcome.item.number) for outcome in outcomes if not outcome.is_good]
    console.print(f"{seconds:.0f} s. Items that failed, or broke a bound: {', '.join(failed) or 'none'}.")


def value_of(row: Row) -> str:
    """Return a value as text."""
    if isinstance(row.value, str):
        return row.value
    return f"{row.value:.4g} {row.unit}".strip()


def verdict_of(is_kept: bool | None) -> str:
    """Return whether a bound is kept, as text."""
    return {None: "", True: "yes", False: "NO"}[is_kept]


def write(path: Path, outcomes: list[Outcome], seconds: float, *, is_simulated: bool) -> None:
    """Write all results as JSON."""
    content = {
        "is_simulated": is_simulated,
        "seconds": seconds,
        "items": [
            {
                "number": outcome.item.number,
                "name": outcome.item.name,
                "seconds": outcome.seconds,
                "problem": outcome.problem,
                "is_skipped": outcome.is_skipped,
                "rows": [asdict(row) for row in outcome.rows],
            }
            for outcome in outcomes
        ],
    }
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
