"""A plan as a table on the terminal, with the recommendation below it."""

from collections.abc import Mapping
from typing import Any

from equipoise.extensions.planning.command.rows import (
    HEADS,
    WORDS,
    alternatives_of,
    caption_of,
    lines_of,
    recommended,
    rows_of,
)

__all__ = ["print_plan"]


def print_plan(plan: Mapping[str, Any]) -> None:
    """Print a plan."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from equipoise.tables.whole_table import print_table

    # 1. The table.
    table = Table(box=SIMPLE)
    for head in HEADS:
        justify: Any = "left" if head in WORDS else "right"
        table.add_column(head, justify=justify, overflow="fold" if head == HEADS[-1] else "ellipsis")
    for row in rows_of(plan):
        table.add_row(*row)
    console = Console()
    print_table(table, console, repeated=2)

    # 2. What the figures rest on, and what to do.
    recommendation = plan["recommendation"]
    lines = [caption_of(plan), *lines_of(plan), recommended(recommendation)]
    if recommendation["overrides"]:
        lines.append(f"  {' '.join(recommendation['overrides'])}")
    for line in [*lines, *alternatives_of(plan)]:
        console.print(line, soft_wrap=True, markup=False, highlight=False)
