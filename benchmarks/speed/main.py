"""Is Equipoise as fast as before? Ratios within one run, each with a bound.

python benchmarks/speed/main.py             exits with 1 if a row is over its bound, with 2 without a verdict
python benchmarks/speed/main.py --record    for a release: if all bounds are kept, adds a line to the history, and draws
                                            its chart
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

FOLDER = Path(__file__).parent
sys.path.append(str(FOLDER.parent / "overhead"))

from history import record  # noqa: E402
from import_time import measure_imports  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

CONTROL = "control"
TRUSTED_CONTROL = 0.03
"""By how much the hand-written loop may differ from itself; beyond that the machine was too busy for a verdict."""
MEASUREMENTS = 3
"""How often a row is measured that is over its bound at first. Their median decides."""


@dataclass
class Row:
    """A ratio that is watched.

    Attributes:
        name: Its name.
        meaning: What is divided by what.
        bound: The largest ratio that is no alarm.
        ratios: Its measurements.
    """

    name: str
    meaning: str
    bound: float
    ratios: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    @property
    def is_over(self) -> bool:
        if self.name == CONTROL:
            return abs(self.ratio - 1) > TRUSTED_CONTROL
        return self.ratio > self.bound


def make_rows() -> list[Row]:
    return [
        Row(CONTROL, "the hand-written loop / itself", 1 + TRUSTED_CONTROL),
        Row("bare step", "a step without logger and bar / by hand", 0.905),
        Row("full step", "with two logged values, CSV logger and bar / by hand", 0.975),
        Row("logged value", "a value logged in each step / a step by hand", 0.04),
        Row("epoch of five batches", "from its opening to the next / by hand", 2.25),
        Row("ddp step", "in two processes / by hand with torch's wrapper", 1.25),
        Row("import", "import equipoise / import torch", 1.05),
        Row("first step", "from the start of a program / with Lightning", 1.02),
    ]


def measure(names: Sequence[str], options: argparse.Namespace) -> dict[str, float]:
    """Measure rows once, each part in processes of its own."""
    ratios: dict[str, float] = {}
    loops = [name for name in names if name not in ("import", "first step")]
    if loops:
        output = _output("loops.py", "--steps", options.steps, "--planted", options.planted, *loops)
        ratios |= json.loads(output)
    if "import" in names:
        ratios["import"] = measure_imports(options.starts).ratio
    if "first step" in names:
        ratios["first step"] = float(_output("first_step.py", options.starts))
    return ratios


def _output(script: str, *arguments: object) -> str:
    """Return the last line that a script prints."""
    command = [sys.executable, str(FOLDER / script), *map(str, arguments)]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return finished.stdout.splitlines()[-1]


def measure_until_certain(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Measure each row once, and again those that are over their bounds."""
    asked = list(rows)
    for _ in range(MEASUREMENTS):
        ratios = measure([row.name for row in asked], options)
        for row in asked:
            row.ratios.append(ratios[row.name])
        # A row that was over once has all of its measurements.
        asked = [row for row in asked if row.is_over or len(row.ratios) > 1]
        if not asked:
            return


def conclude(rows: Sequence[Row], console: Console) -> int:
    """Print the table and the verdict.

    Returns:
        0; 1 if a row is over its bound; 2 if there is no verdict.
    """
    table = Table("row", "ratio", "bound", "measured", "of")
    for row in rows:
        bound = f"{row.bound:.3f}"
        table.add_row(
            row.name, f"{row.ratio:.3f}", bound, " ".join(f"{ratio:.3f}" for ratio in row.ratios), row.meaning
        )
    console.print(table)
    over = [row for row in rows if row.is_over]
    if any(row.name == CONTROL for row in over):
        console.print("No verdict: the hand-written loop differs from itself. Try again on a quieter machine.")
        return 2
    for row in over:
        console.print(f"Over its bound: {row.name}, {row.ratio:.3f}, at most {row.bound}.")
    if not over:
        console.print("All bounds are kept.")
    return int(bool(over))


def main(command: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [row.name for row in make_rows()]
    parser.add_argument("--rows", nargs="+", choices=names, default=names, metavar="ROW", help="default: all")
    parser.add_argument("--steps", type=int, default=4000, help="steps of each loop (default: 4000)")
    parser.add_argument("--starts", type=int, default=4, help="starts of each program (default: 4)")
    parser.add_argument("--planted", type=float, default=0.0, help="microseconds by which to slow down each step")
    parser.add_argument("--record", action="store_true", help="add a line to the history, and draw its chart")
    options = parser.parse_args(command)
    if options.record and (options.planted or set(options.rows) != set(names)):
        parser.error("--record takes all rows, without --planted")
    rows = [row for row in make_rows() if row.name in options.rows]
    measure_until_certain(rows, options)
    code = conclude(rows, Console())
    if options.record and code == 0:
        record({row.name: (round(row.ratio, 3), row.bound) for row in rows if row.name != CONTROL})
    return code


if __name__ == "__main__":
    sys.exit(main())
