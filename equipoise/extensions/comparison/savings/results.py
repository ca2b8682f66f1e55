"""Results of the trials: compared with the first of them, as a table and as JSON."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from equipoise.formats import format_bytes, format_duration

__all__ = ["Result", "compare", "print_results", "to_json"]


@dataclass(frozen=True)
class Result:
    """The result of a trial.

    Attributes:
        name: The name of the saver.
        overrides: The overrides that turn it on.
        peak: The peak of the memory in bytes; None if it was not measured.
        seconds: The time of a step.
        numbers: "to the bit" if losses and weights equal those of the first trial, or the difference of the losses.
        reason: The reason why nothing was measured; None if it was.
    """

    name: str
    overrides: Sequence[str] = ()
    peak: int | None = None
    seconds: float | None = None
    numbers: str | None = None
    reason: str | None = None


def compare(measured: dict[str, Any], first: dict[str, Any] | None) -> str | None:
    """Return how the numbers of a trial differ from those of the first; None if there is none.

    Example:
        >>> compare({"digest": "a", "losses": [1.0, 0.5]}, {"digest": "b", "losses": [1.0, 0.4]})
        'losses within 2e-01'
    """
    if first is None or "digest" not in first:
        return None
    losses = measured["losses"]
    if measured["digest"] == first["digest"] and losses == first["losses"]:
        return "to the bit"
    if None in losses or None in first["losses"]:
        # The step has none, as in manual optimisation.
        return "weights differ"
    if losses == first["losses"]:
        return "losses to the bit"
    differences = []
    for loss, expected in zip(losses, first["losses"], strict=True):
        largest = max(abs(loss), abs(expected))
        # Two losses of zero are equal.
        difference = 0.0
        if largest:
            difference = abs(loss - expected) / largest
        differences.append(difference)
    largest_difference = max(differences)
    if not math.isfinite(largest_difference):
        return "losses differ"
    return f"losses within {largest_difference:.0e}"


def to_json(results: Sequence[Result], device: str | None) -> str:
    """Return the results as JSON."""
    return json.dumps({"device": device, "savers": [asdict(result) for result in results]}, indent=2)


def print_results(results: Sequence[Result], device: str | None) -> None:
    """Print the results as a table, and below it the overrides."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from equipoise.tables.whole_table import print_table, print_text

    # 1. The table.
    measure = "by the ledger of tensors"
    if device is not None and device.startswith("cuda"):
        measure = "by the allocator"
    table = Table(box=SIMPLE)
    table.add_column("saver", no_wrap=True)
    for column in ("peak", "", "step", ""):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("numbers", no_wrap=True)
    first = results[0] if results else None
    for result in results:
        if result.reason is not None:
            table.add_row(result.name, "-", "", "-", "", "not measured")
            continue
        assert result.peak is not None
        assert result.seconds is not None
        table.add_row(
            result.name,
            format_bytes(result.peak),
            _ratio(result.peak, None if first is None else first.peak),
            format_duration(result.seconds),
            _ratio(result.seconds, None if first is None else first.seconds),
            result.numbers or "-",
        )
    console = Console()
    print_table(table, console)
    caption = f"One step on {device or 'no device'}; peak {measure}."
    print_text(caption, console)

    # 2. Reasons, and overrides in lines that can be copied.
    for result in results:
        if result.reason is not None:
            text = f"not measured: {result.reason}"
        elif result.overrides:
            text = " ".join(result.overrides)
        else:
            continue
        print_text(f"{result.name}:\n  {text}", console)


def _ratio(value: float, first: float | None) -> str:
    if not first:
        return ""
    return f"{value / first:.0%}"
