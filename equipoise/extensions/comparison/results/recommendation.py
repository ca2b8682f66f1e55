"""The recommended strategy, with its reason in a sentence."""

from collections.abc import Sequence
from typing import Any

from equipoise.extensions.comparison.results.comparison import Comparison, Row
from equipoise.formats import format_bytes, format_count

__all__ = ["notes_on", "recommend"]

# Rates that differ by less are equal: measurements of few steps vary.
_SAME = 0.05


def recommend(comparison: Comparison) -> dict[str, Any] | None:
    """Return the recommended row, with the reason; None if nothing was measured.

    It is the fastest one. Of strategies whose rates differ by up to 5%, it is the one whose fullest device needs least
    memory, and of those that need as much, within 5%, the simplest.

    Args:
        comparison: The results, in the order from simple to complex.

    Returns:
        A mapping with the keys "strategy", "overrides" and "reason".
    """
    # 1. Those with a rate.
    rows = [row for row in comparison.measured if row.samples_per_second]
    if not rows:
        return None
    # 2. The fastest ones, and of these the first that needs least memory: the order is from simple to complex.
    best_rate = max(_rate(row) for row in rows)
    fast = [row for row in rows if _rate(row) >= (1 - _SAME) * best_rate]
    least = min(_peak(row) for row in fast)
    chosen = next(row for row in fast if _needs_as_little(row, least))
    return {
        "strategy": chosen.label,
        "overrides": list(chosen.overrides),
        "reason": _reason(chosen, rows, fast),
    }


def _reason(chosen: Row, rows: Sequence[Row], fast: Sequence[Row]) -> str:
    rate = f"{format_count(_rate(chosen))} samples per second"
    memory = f"{format_bytes(_peak(chosen))} on its fullest device"
    # 1. Nothing to compare with.
    if len(rows) == 1:
        return f"It is the only one that ran: {rate}, {memory}."
    # 2. The fastest by more than measurements vary.
    if len(fast) == 1:
        second = max((row for row in rows if row is not chosen), key=_rate)
        return (
            f"It is the fastest, with {rate}, before {second.label} with {format_count(_rate(second))}; it needs"
            f" {memory}."
        )
    # 3. One of several.
    others = [row for row in fast if row is not chosen]
    names = ", ".join(row.label for row in others)
    least = min(_peak(row) for row in fast)
    if any(_needs_as_little(row, least) for row in others):
        return f"It is as fast as {names}, with {rate}, and the simplest of those that need least memory: {memory}."
    return f"It is as fast as {names}, with {rate}, and needs least memory of them: {memory}."


def _needs_as_little(row: Row, least: int) -> bool:
    return _peak(row) <= (1 + _SAME) * least


def _rate(row: Row) -> float:
    return row.samples_per_second or 0.0


def _peak(row: Row) -> int:
    return row.fullest or 0


def notes_on(devices: Sequence[str], *, has_batch_size: bool) -> list[str]:
    """Return what the figures do and do not tell.

    Args:
        devices: Names of the devices in torch.
        has_batch_size: Whether data.batch_size is known, so that steps have equal numbers of samples.
    """
    notes = []
    if all(device.startswith("cpu") for device in devices):
        notes.append(
            "There is no GPU among the devices. Peaks and imbalance are those of the tensors, to the byte, as they"
            " would be on GPUs, but for the workspaces, rounding and context of CUDA. Speeds hold for this machine"
            " alone."
        )
    if len(set(devices)) < len(devices):
        notes.append(
            "Devices of one name share their cores, and dp, balanced and pipeline compute their parts one after another"
            " on them. So the speeds do not tell which strategy is fastest on devices of their own."
        )
        if not all(device.startswith("cpu") for device in devices):
            notes.append("The peak of a GPU that is given several times is that of all its parts.")
    if not has_batch_size:
        notes.append(
            "There is no data.batch_size, so each process of ddp and fsdp takes batches as large as those of one"
            " device, and their weights cannot be compared."
        )
    return notes
