"""A plan in words: its table, what it rests on, and the recommendation."""

from collections.abc import Mapping, Sequence
from typing import Any

from equipoise.formats import counted, format_bytes, format_count

__all__ = ["HEADS", "WORDS", "lines_of", "print_plan", "recommended", "rows_of"]

# The process of the command writes a plan as a dictionary. An entry of it describes a strategy, with its devices.
Plan = Mapping[str, Any]
Entry = Mapping[str, Any]
Device = Mapping[str, Any]

HEADS = ("strategy", "device", "samples", "peak", "usable", "room", "largest batch", "at the peak")
# Columns of text.
WORDS = ("strategy", "device", "at the peak")

# Parts of a peak that a row names.
_MOST_PARTS = 4
# A largest batch from here on is no limit.
_NO_LIMIT = 2**24


def _caption_of(plan: Plan) -> str:
    """Return the line below the table."""
    size = counted(plan["batch_size"], "sample")
    if plan["budget"]:
        size = f"{plan['budget']} tokens"
    return (
        f"A batch of {size}; a step {plan['method']}. usable: without the context of a process"
        " and 5% for gaps on GPUs, not confirmed on one."
    )


def rows_of(plan: Plan) -> list[list[str]]:
    """Return a row for each strategy and device."""
    rows = []
    for entry in plan["strategies"]:
        for index, device in enumerate(entry["devices"]):
            rows.append(_cells(plan, entry, device, is_first=index == 0))
        if not entry["devices"]:
            rows.append([entry["strategy"], "-", "", "-", "", "", "", ""])
    return rows


def _cells(plan: Plan, entry: Entry, device: Device, *, is_first: bool) -> list[str]:
    peak = device["peak"]
    usable = device["usable"]
    strategy = ""
    largest_batch = ""
    # A strategy is named once.
    if is_first:
        strategy = entry["strategy"]
        largest_batch = _largest(plan, entry)
    room = format_bytes(abs(usable - peak["nbytes"]))
    if not device["fits"]:
        room = f"{room} too much"
    return [
        strategy,
        device["name"],
        str(device["samples"]),
        format_bytes(peak["nbytes"]),
        format_bytes(usable),
        room,
        largest_batch,
        _composition(peak),
    ]


def _composition(peak: Mapping[str, Any]) -> str:
    """Return the phase of a peak and its largest parts."""
    parts = list(peak["parts"].items())
    texts = []
    for part, nbytes in parts[:_MOST_PARTS]:
        texts.append(f"{part} {format_bytes(nbytes)}")
    return f"{peak['phase']}: {', '.join(texts)}"


def _largest(plan: Plan, entry: Entry) -> str:
    largest = entry["largest_batch"]
    if not largest:
        return "none"
    text = format_count(largest)
    if largest >= _NO_LIMIT:
        text = "any"
    elif plan["budget"]:
        text = f"{largest} tokens"
    if entry["batches"] > 1:
        # Each process has a batch of its own.
        text = f"{entry['batches']} x {text}"
    return text


def lines_of(plan: Plan) -> list[str]:
    """Return sentences on what the figures rest on."""
    lines = []
    for entry in plan["strategies"]:
        if entry["reason"]:
            lines.append(f"{entry['strategy']}: not predicted: {entry['reason']}.")
        elif entry["note"]:
            lines.append(f"{entry['strategy']}: {entry['note']}.")
    return [*lines, *_lines_on_others(plan["strategies"]), *plan["notes"]]


def _lines_on_others(entries: Sequence[Entry]) -> list[str]:
    """Return a line for each device on which other processes hold memory."""
    # Several strategies have the same devices.
    lines: dict[str, str] = {}
    for entry in entries:
        for device in entry["devices"]:
            name = device["name"]
            nbytes = device["occupied"]
            if nbytes:
                lines[name] = f"Other processes hold {format_bytes(nbytes)} of {name}."
    return list(lines.values())


def recommended(recommendation: Mapping[str, Any]) -> str:
    """Return the recommendation as a sentence."""
    if recommendation["strategy"]:
        return f"Take {recommendation['strategy']}: {recommendation['reason']}."
    return f"Nothing to recommend: {recommendation['reason']}."


def _alternatives_of(plan: Plan) -> list[str]:
    """Return lines on overrides that need less memory."""
    lines = []
    for alternative in plan["alternatives"]:
        results = [_verdict(entry) for entry in alternative["strategies"] if entry["devices"]]
        lines.append(f"With {' '.join(alternative['overrides'])}:")
        lines.append(f"  {', '.join(results)}")
    return lines


def _verdict(entry: Entry) -> str:
    """Return a strategy with its largest peak, and whether it fits."""
    peak = max(device["peak"]["nbytes"] for device in entry["devices"])
    return f"{entry['strategy']} {format_bytes(peak)} ({'fits' if entry['fits'] else 'does not fit'})"


def print_plan(plan: Mapping[str, Any]) -> None:
    """Print a plan."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from equipoise.tables.whole_table import print_table, print_text

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
    lines = [_caption_of(plan), *lines_of(plan), recommended(recommendation)]
    if recommendation["overrides"]:
        lines.append(f"  {' '.join(recommendation['overrides'])}")
    for line in [*lines, *_alternatives_of(plan)]:
        print_text(line, console)
