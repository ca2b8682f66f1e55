"""Cost of a step over a hand-written loop: Equipoise beside Lightning, Fabric, Accelerate and Ignite, on one thread.

python benchmarks/overhead/main.py                          the whole table, a quarter of an hour
python benchmarks/overhead/main.py --frameworks equipoise   Equipoise alone
python benchmarks/overhead/main.py --check                  exits with 1 if a bound is broken, with 2 without a verdict
"""

import argparse
import json
import logging
import platform
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

import by_hand
import torch
from frameworks import ALL, Contestant, frameworks
from import_time import ImportTimes, measure_imports
from rich.console import Console
from rich.table import Table
from timing import BY_HAND, NOISE, Entry, Row, measure
from verdict import TRUSTED_NOISE, broken_bounds, noise
from workload import Size, make_batches

HAND: dict[str, Contestant] = {
    "training": by_hand.train,
    "samples": by_hand.train_on_samples,
    "accumulation": by_hand.accumulate,
    "evaluation": by_hand.evaluate,
}
COLUMNS = ["group", "contestant", "load", "per step", "over by hand", "quartiles", "ratio", "rounds"]
WIDTH = 110


def arguments(command: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=_positive, default=15, help="shuffled rounds (default: 15)")
    parser.add_argument("--steps", type=_positive, default=1500, help="timed steps of each run (default: 1500)")
    parser.add_argument("--warm-up", type=_positive, default=50, help="steps before the clock starts (default: 50)")
    parser.add_argument(
        "--frameworks",
        nargs="+",
        choices=ALL,
        default=ALL,
        metavar="NAME",
        help=f"out of {', '.join(ALL)} (default: all)",
    )
    parser.add_argument(
        "--loads",
        nargs="+",
        metavar="LOAD",
        help="bare, compiled, logs, full, 'full with epoch values', samples, accumulation, evaluation (default: all)",
    )
    parser.add_argument(
        "--import-rounds", type=int, default=9, help="pairs of fresh interpreters; 0 leaves the import out (default: 9)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the shuffling (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the table there as Markdown, for the README"
    )
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if a bound is broken, with 2 if there is no verdict"
    )
    return parser.parse_args(command)


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, but {number} was given")
    return number


def entries(names: list[str], loads: list[str] | None) -> tuple[list[Entry], list[str]]:
    """Return the contestants, the hand-written loops first, and the frameworks that are missing."""
    found = frameworks(names)
    taking_part = [
        Entry(load if load in HAND else "training", name, load, run)
        for name, contestants in found.items()
        for load, run in contestants.items()
        if loads is None or load in loads
    ]
    groups = [group for group in HAND if any(entry.group == group for entry in taking_part)]
    hand = [Entry(group, name, group, HAND[group]) for group in groups for name in (BY_HAND, NOISE)]
    return [*hand, *taking_part], [name for name in names if name not in map(str.lower, found)]


def cells(row: Row) -> list[str]:
    """A row as it is shown; the hand-written loop is compared with nothing."""
    own = [row.group, row.name, "" if row.load == row.group else row.load, f"{row.time:.1f}"]
    spread = f"{row.low:+.1f} … {row.high:+.1f}"
    compared = ("", "", "") if row.name == BY_HAND else (f"{row.over:+.1f}", spread, f"{row.ratio:.3f}")
    return [*own, *compared, str(row.rounds)]


def table(rows: list[Row], size: Size, rounds: int) -> Table:
    """The rows, group by group."""
    result = Table(
        title=f"µs of processor time per step: medians of the undisturbed of {rounds} rounds of {size.steps} steps"
    )
    for index, column in enumerate(COLUMNS):
        result.add_column(column, justify="left" if index < 3 else "right")
    for group in HAND:
        for row in (row for row in rows if row.group == group):
            result.add_row(*cells(row))
        result.add_section()
    return result


def markdown(rows: list[Row]) -> str:
    """The same for the README."""
    rule = ["---"] * 3 + ["---:"] * (len(COLUMNS) - 3)
    ordered = sorted(rows, key=lambda row: list(HAND).index(row.group))
    return "".join(f"| {' | '.join(line)} |\n" for line in [COLUMNS, rule, *map(cells, ordered)])


def environment() -> str:
    python = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{python}, {platform.machine()}, {platform.system()}, 1 thread"


def conclude(console: Console, rows: list[Row], imports: ImportTimes | None, *, least_rounds: int = 1) -> int:
    """Prints the verdict; returns the exit code of `--check`."""
    if few := [f"{row.name} {row.load}" for row in rows if row.name == "Equipoise" and row.rounds < least_rounds]:
        console.print(
            f"No verdict: fewer than {least_rounds} rounds of {', '.join(few)} were undisturbed. Try again on a"
            " quieter machine, or with more rounds."
        )
        return 2
    if (off := noise(rows)) > TRUSTED_NOISE:
        console.print(
            f"No verdict: a second hand-written row is off by {off:.1f} µs, more than {TRUSTED_NOISE:.0f}."
            " Try again on a quieter machine."
        )
        return 2
    broken = broken_bounds(rows, imports)
    for sentence in broken:
        console.print(f"Bound broken: {sentence}.")
    if not broken:
        console.print("All bounds that were measured are kept.")
    return int(bool(broken))


def main(command: list[str] | None = None) -> int:
    options, console = arguments(command), Console()
    console.width = max(console.width, WIDTH)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning", "equipoise"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)

    size = Size(options.steps, options.warm_up)
    taking_part, missing = entries(list(options.frameworks), options.loads)
    for name in missing:
        console.print(f"{name} is not installed and left out.")
    rows = measure(
        taking_part,
        make_batches(),
        size=size,
        rounds=options.rounds,
        seed=options.seed,
        report=lambda done: print(f"\rround {done} of {options.rounds}", end="", file=sys.stderr, flush=True),
    )
    print(file=sys.stderr)
    imports = None
    if options.import_rounds > 0:
        imports = measure_imports(options.import_rounds)

    console.print(table(rows, size, options.rounds))
    console.print(environment())
    if imports is not None:
        console.print(
            f"import torch {imports.torch:.2f} s, import equipoise {imports.equipoise:.2f} s: ratio {imports.ratio:.2f}"
        )
    if options.json is not None:
        content = {
            "environment": environment(),
            "rows": [asdict(row) for row in rows],
            "imports": imports and asdict(imports),
        }
        options.json.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    if options.markdown is not None:
        options.markdown.write_text(markdown(rows))
    code = conclude(console, rows, imports, least_rounds=max(1, options.rounds // 4))
    return code if options.check else 0


if __name__ == "__main__":
    sys.exit(main())
