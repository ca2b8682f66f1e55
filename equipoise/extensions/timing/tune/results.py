"""What `equipoise tune` tells: a sentence, a table, the overrides, or all of it as JSON."""

import json
from collections.abc import Sequence
from statistics import median

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from equipoise.extensions.timing.limits import SHORT_STEPS
from equipoise.extensions.timing.tune.rounds import Baseline, Row
from equipoise.formats import format_duration
from equipoise.tables.whole_table import print_table

__all__ = ["as_json", "best_of", "print_results", "sentence"]

# Times that differ by less are equal: the first candidate is the simplest.
_SAME = 1.05
_LEAST_SHOWN = 0.01


def best_of(rows: Sequence[Row]) -> Row | None:
    """Return the candidate to use: the first of those that are as fast as the fastest; None if none is faster.

    Args:
        rows: The run as it is, then the candidates.
    """
    base, *others = rows
    better = [row for row in others if row.is_improvement(base)]
    if not better:
        return None
    fastest = min(row.seconds() for row in better)
    return next(row for row in better if row.seconds() <= _SAME * fastest)


def sentence(baseline: Baseline, rows: Sequence[Row], steps: int) -> str:
    """Return the limit, and what its best remedy makes of it.

    Args:
        baseline: The times of the run as it is.
        rows: The run as it is, then the candidates.
        steps: Number of timed steps of each trial.
    """
    limit = baseline.limit
    if limit is None:
        return "Nothing limits this run that a setting could change."
    best = best_of(rows)
    if best is not None:
        # Short steps are no part of a step.
        after = f"{best.shares.get(limit.part, 0.0):.0%}"
        if limit.part == SHORT_STEPS:
            after = format_duration(best.seconds())
        return f"{limit.statement}: {best.candidate.label} makes it {after} (measured over {steps:,} steps)"
    if any(row.is_measured for row in rows[1:]):
        return f"{limit.statement}, and nothing that was tried makes it faster."
    return f"{limit}. Not measured."


def print_results(baseline: Baseline, rows: Sequence[Row], steps: int) -> None:
    """Print the table of what was measured, or the parts if nothing was, the sentence and the overrides.

    Args:
        baseline: The times of the run as it is.
        rows: The run as it is, then the candidates.
        steps: Number of timed steps of each trial.
    """
    console = Console()
    lines = []
    # 1. The figures.
    if rows[0].is_measured:
        print_table(_table(baseline, rows, steps), console)
    else:
        shares = [f"{name} {share:.0%}" for name, share in baseline.shares.items() if share >= _LEAST_SHOWN]
        lines.append(f"A step takes {format_duration(baseline.step_seconds)}: {', '.join(shares)}")
    lines += [f"{row.candidate.label} was not measured: {row.reason}" for row in rows if row.reason is not None]
    if baseline.left_out:
        lines.append(f"Left out of the measurements: {', '.join(baseline.left_out)}")
    # 2. The sentence, with overrides in a line that can be copied.
    lines.append(sentence(baseline, rows, steps))
    best = best_of(rows)
    if best is not None:
        lines.append(f"\n  {best.candidate.label}")
        if not best.candidate.overrides:
            lines.append("\nThe configuration has no key for it: change the code that makes the DataLoader.")
    for line in lines:
        console.print(Text(line), soft_wrap=True)


def _table(baseline: Baseline, rows: Sequence[Row], steps: int) -> Table:
    part = baseline.limit.part if baseline.limit else ""
    title = f"{steps:,} steps each, in {len(rows[0].step_seconds)} rounds"
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, title=title, title_justify="left")
    table.add_column("change", no_wrap=True)
    for head in ("step", "speed", part):
        table.add_column(Text(head), justify="right")
    for row in rows:
        if not row.is_measured:
            continue
        style = ""
        if row.is_improvement(rows[0]):
            style = "green"
        speed = Text(f"{median(row.speeds(rows[0])):.2f}x", style)
        share = f"{row.shares.get(part, 0.0):.0%}"
        # As texts, since rich would read brackets as markup.
        table.add_row(Text(row.candidate.label), format_duration(row.seconds()), speed, share)
    return table


def as_json(baseline: Baseline, rows: Sequence[Row], steps: int) -> str:
    """Return all that was measured; see `print_results`."""
    entries = []
    for row in rows:
        entry = {
            "change": row.candidate.label,
            "overrides": row.candidate.overrides,
            "step_seconds": row.step_seconds,
            "speeds": row.speeds(rows[0]),
            "is_improvement": row.is_improvement(rows[0]),
            "shares": row.shares,
            "reason": row.reason,
        }
        entries.append(entry)
    best = best_of(rows)
    result = {
        "limit": baseline.limit and baseline.limit.part,
        "sentence": sentence(baseline, rows, steps),
        "step_seconds": baseline.step_seconds,
        "shares": baseline.shares,
        "steps": steps,
        "rows": entries,
        "overrides": best.candidate.overrides if best else [],
    }
    return json.dumps(result, indent=2)
