"""Results of `equipoise tune`: a sentence, a table, the overrides, or all of it as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from equipoise.extensions.timing.limits import SHORT_STEPS
from equipoise.extensions.timing.tune.rounds import Rounds, Row
from equipoise.formats import format_duration
from equipoise.tables.whole_table import print_table, print_text

__all__ = ["as_json", "best_of", "print_results"]

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
    speeds = [median(row.speeds(base)) for row in better]
    fastest = max(speeds)
    as_fast = [row for row, speed in zip(better, speeds, strict=True) if _SAME * speed >= fastest]
    return as_fast[0]


def _sentence(rounds: Rounds) -> str:
    """Return the limit, and its effect under the best remedy."""
    limit = rounds.limit
    if limit is None:
        return "Nothing limits this run that a setting could change."
    best = best_of(rounds.rows)
    if best is not None:
        # Short steps are no part of a step.
        after = f"{best.shares.get(limit.part, 0.0):.0%}"
        if limit.part == SHORT_STEPS:
            after = format_duration(median(best.step_seconds))
        return f"{limit.statement}: {best.candidate.label} makes it {after} (measured over {rounds.steps:,} steps)"
    if any(row.is_measured for row in rounds.rows[1:]):
        return f"{limit.statement}, and nothing that was tried makes it faster."
    return f"{limit}. Not measured."


def print_results(rounds: Rounds) -> None:
    """Print the table of what was measured, or the parts if nothing was, the sentence and the overrides."""
    console = Console()
    lines = []
    # 1. The figures.
    if rounds.rows[0].is_measured:
        print_table(_table(rounds), console)
    else:
        shares = []
        for name, share in rounds.first["shares"].items():
            if share >= _LEAST_SHOWN:
                shares.append(f"{name} {share:.0%}")
        step_seconds = rounds.first["seconds"] / rounds.first["steps"]
        lines.append(f"A step takes {format_duration(step_seconds)}: {', '.join(shares)}")
    for row in rounds.rows:
        if row.reason is not None:
            lines.append(f"{row.candidate.label} was not measured: {row.reason}")
    if rounds.left_out:
        lines.append(f"Left out of the measurements: {', '.join(rounds.left_out)}")
    # 2. The sentence, with overrides in a line that can be copied.
    lines.append(_sentence(rounds))
    best = best_of(rounds.rows)
    if best is not None:
        lines.append(f"\n  {best.candidate.label}")
        if not best.candidate.overrides:
            lines.append("\nThe configuration has no key for it: change the code that makes the DataLoader.")
    for line in lines:
        print_text(line, console)


def _table(rounds: Rounds) -> Table:
    base = rounds.rows[0]
    part = ""
    if rounds.limit:
        part = rounds.limit.part
    title = f"{rounds.steps:,} steps each, in {len(base.step_seconds)} rounds"
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, title=title, title_justify="left")
    table.add_column("change", no_wrap=True)
    for head in ("step", "speed", part):
        table.add_column(Text(head), justify="right")
    for row in rounds.rows:
        if not row.is_measured:
            continue
        style = "green" if row.is_improvement(base) else ""
        speed = median(row.speeds(base))
        step_seconds = median(row.step_seconds)
        share = row.shares.get(part, 0.0)
        # As texts, since rich would read brackets as markup.
        label = Text(row.candidate.label)
        table.add_row(label, format_duration(step_seconds), Text(f"{speed:.2f}x", style), f"{share:.0%}")
    return table


def as_json(rounds: Rounds) -> str:
    """Return all measurements as JSON."""
    base = rounds.rows[0]
    rows = []
    for row in rounds.rows:
        entry = asdict(row)
        entry["label"] = row.candidate.label
        entry["speeds"] = row.speeds(base)
        entry["is_improvement"] = row.is_improvement(base)
        rows.append(entry)
    best = best_of(rounds.rows)
    result = {
        "limit": rounds.limit and rounds.limit.part,
        "sentence": _sentence(rounds),
        "shares": rounds.first["shares"],
        "steps": rounds.steps,
        "rows": rows,
        "overrides": best.candidate.overrides if best else [],
    }
    return json.dumps(result, indent=2)
