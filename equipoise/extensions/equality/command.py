"""`equipoise curves-equal`: print where two runs differ first."""

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from equipoise.app.command import Reader, present, read_flags
from equipoise.errors import ConfigurationError
from equipoise.extensions.equality.compare import compare_runs
from equipoise.extensions.equality.result import RunComparison
from equipoise.tables.whole_table import print_table, print_text

__all__ = ["run_curves_equal"]

_TAKES = "equipoise curves-equal takes RUN_A RUN_B, --atol=NUMBER, --rtol=NUMBER and --json"

# Rows of the table.
_MOST_ROWS = 12


def run_curves_equal(arguments: Sequence[str], folders: Sequence[Path]) -> int:
    """Run the command.

    Returns:
        The exit code: 0 if the runs are equal, 1 if they differ.

    Raises:
        ConfigurationError: See `compare_runs`.
        CheckpointError: See `compare_runs`.
    """
    paths, flags = read_flags(arguments, _READERS, _TAKES)
    if len(paths) != 2:
        raise ConfigurationError(f"{_TAKES}; it was given {' '.join(paths) or 'no path'}.")
    result = compare_runs(*paths, atol=flags.get("--atol", 0.0), rtol=flags.get("--rtol", 0.0))
    if "--json" in flags:
        print(result.to_json())
    else:
        _print(result)
    return int(not result.equal)


def _number(name: str, text: str | None) -> float:
    try:
        return float(text or "")
    except ValueError:
        raise ConfigurationError(f"{name} takes a number, such as {name}=1e-6, not {text!r}.") from None


_READERS: dict[str, Reader] = {"--atol": _number, "--json": present, "--rtol": _number}


def _print(result: RunComparison) -> None:
    # 1. The sentence, and the table of all first differences.
    print_text(result.sentence)
    if result.differences:
        print_table(_table(result), leaves_out=True)
    further = len(result.differences) - _MOST_ROWS
    if further > 0:
        print(f"and {further} more, which --json lists")

    # 2. Everything that did not count.
    for reason in result.not_compared:
        print_text(f"not compared: {reason}")
    if result.left_out:
        print_text(f"left out, as they differ by nature: {', '.join(result.left_out)}")


def _table(result: RunComparison) -> Table:
    table = Table(box=SIMPLE_HEAD, header_style="bold")
    table.add_column("first at step", justify="right")
    table.add_column("name", overflow="fold")
    for head in ("A", "B"):
        table.add_column(head, overflow="fold")
    for head in ("by at most", "of", "at"):
        table.add_column(head)
    for difference in result.differences[:_MOST_ROWS]:
        amount = ""
        if difference.amount is not None:
            amount = f"{difference.amount:.3g}"
        place = ""
        if difference.place:
            place = str(difference.place)
        table.add_row(
            str(difference.step),
            difference.name,
            difference.first,
            difference.second,
            amount,
            difference.part,
            place,
        )
    return table
