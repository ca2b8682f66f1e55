"""A plan in words: the rows of its table, what they rest on, and the recommendation."""

from collections.abc import Mapping, Sequence
from typing import Any

from equipoise.formats import format_bytes, format_count

__all__ = ["HEADS", "WORDS", "alternatives_of", "caption_of", "lines_of", "recommended", "rows_of"]

HEADS = ("strategy", "device", "samples", "peak", "usable", "room", "largest batch", "at the peak")
# Columns of words.
WORDS = ("strategy", "device", "at the peak")

# Parts of a peak that a row names.
_MOST_PARTS = 4
# A largest batch from here on is no limit.
_NO_LIMIT = 2**24


def caption_of(plan: Mapping[str, Any]) -> str:
    """Return the line below the table."""
    size = f"{plan['batch_size']} samples"
    if plan["budget"]:
        size = f"{plan['budget']} tokens"
    return (
        f"A batch of {size}; a step {plan['method']}. usable: without the context of a process"
        " and 5% for gaps on GPUs, not confirmed on one."
    )


def rows_of(plan: Mapping[str, Any]) -> list[list[str]]:
    """Return a row for each strategy and device.

    Args:
        plan: The plan, as the process of the command has made it.
    """
    rows = []
    for entry in plan["strategies"]:
        for index, device in enumerate(entry["devices"]):
            rows.append(_cells(plan, entry, device, is_first=index == 0))
        if not entry["devices"]:
            rows.append([entry["strategy"], "-", "", "-", "", "", "", ""])
    return rows


def _cells(
    plan: Mapping[str, Any], entry: Mapping[str, Any], device: Mapping[str, Any], *, is_first: bool
) -> list[str]:
    peak = device["peak"]
    parts = []
    for part, nbytes in list(peak["parts"].items())[:_MOST_PARTS]:
        parts.append(f"{part} {format_bytes(nbytes)}")
    room = "does not fit"
    if device["fits"]:
        room = format_bytes(device["usable"] - peak["nbytes"])
    cells = [
        entry["strategy"],
        device["name"],
        str(device["samples"]),
        format_bytes(peak["nbytes"]),
        format_bytes(device["usable"]),
        room,
        _largest(plan, entry),
        f"{peak['phase']}: {', '.join(parts)}",
    ]
    if not is_first:
        # A strategy is named once.
        cells[0] = ""
        cells[6] = ""
    return cells


def _largest(plan: Mapping[str, Any], entry: Mapping[str, Any]) -> str:
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


def lines_of(plan: Mapping[str, Any]) -> list[str]:
    """Return sentences on what the figures rest on.

    Args:
        plan: The plan.
    """
    lines = []
    for entry in plan["strategies"]:
        if entry["reason"]:
            lines.append(f"{entry['strategy']}: not predicted: {entry['reason']}.")
        elif entry["note"]:
            lines.append(f"{entry['strategy']}: {entry['note']}.")
    return [*lines, *_lines_on_others(plan["strategies"]), *plan["notes"]]


def _lines_on_others(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each device on which other processes hold memory."""
    occupied: dict[str, int] = {}
    for entry in entries:
        for device in entry["devices"]:
            if device["occupied"]:
                occupied[device["name"]] = device["occupied"]
    return [f"Other processes hold {format_bytes(nbytes)} of {name}." for name, nbytes in occupied.items()]


def recommended(recommendation: Mapping[str, Any]) -> str:
    """Return the recommendation as a sentence."""
    if recommendation["strategy"]:
        return f"Take {recommendation['strategy']}: {recommendation['reason']}."
    return f"Nothing to recommend: {recommendation['reason']}."


def alternatives_of(plan: Mapping[str, Any]) -> list[str]:
    """Return lines on overrides that need less memory.

    Args:
        plan: The plan.
    """
    lines = []
    for alternative in plan["alternatives"]:
        results = []
        for entry in alternative["strategies"]:
            if not entry["devices"]:
                continue
            peak = max(device["peak"]["nbytes"] for device in entry["devices"])
            verdict = f"largest batch {_largest(plan, entry)}"
            if entry["fits"]:
                verdict = "fits"
            results.append(f"{entry['strategy']} {format_bytes(peak)} ({verdict})")
        lines.append(f"With {' '.join(alternative['overrides'])}:")
        lines.append(f"  {', '.join(results)}")
    return lines
