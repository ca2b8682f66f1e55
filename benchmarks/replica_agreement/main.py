"""Planted divergences between processes, healthy programs, and what the comparison costs.

python benchmarks/replica_agreement/main.py                 all programs, and the costs
python benchmarks/replica_agreement/main.py --only NAME     programs whose names contain this
"""

import argparse
import logging
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from costs import measure
from healthy import HEALTHY
from planted import FAULTS, Fault
from rich.console import Console
from rich.table import Table

from equipoise import StepError


def named(fault: Fault, folder: Path) -> str:
    """Run a program with a fault; return what its error fails to name, empty if nothing."""
    try:
        fault.run(folder)
    except StepError as error:
        message = str(error)
        parts = [f"processes: {fault.name} is not the same in {fault.ranks}.", fault.since or "All agreed "]
        return "; ".join(part for part in parts if part not in message) and message[:200]
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return "no error"


def alarm(run: Callable[[Path], object], folder: Path) -> str:
    """Run a healthy program; return its error, empty if there is none."""
    try:
        run(folder)
    except Exception as error:
        if not isinstance(error, StepError):
            traceback.print_exc()
        return f"{type(error).__name__}: {error}"[:300]
    return ""


def show(title: str, column: str, results: dict[str, str]) -> int:
    """Print a table; return the number of programs that did not end as they should."""
    table = Table("program", column, title=title)
    for name, problem in results.items():
        table.add_row(name, problem or "as it should")
    failed = sum(map(bool, results.values()))
    console = Console(width=200)
    console.print(table)
    console.print(f"{len(results) - failed} of {len(results)}")
    return failed


def main(arguments: list[str]) -> int:
    """Run what the arguments say; return 1 if a program did not end as it should."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="programs whose names contain this")
    parser.add_argument("--costs", action=argparse.BooleanOptionalAction, default=True, help="measure costs, too")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning", "equipoise"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    started = time.monotonic()
    failed = 0
    for title, column, programs, judge in (
        ("planted", "error", FAULTS, named),
        ("healthy", "alarm", HEALTHY, alarm),
    ):
        results = {}
        for name, program in programs.items():
            if options.only in name:
                with tempfile.TemporaryDirectory() as folder:
                    results[name] = judge(program, Path(folder))
        if results:
            failed += show(title, column, results)
    print(f"{time.monotonic() - started:.0f} s")
    if options.costs:
        measure()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
