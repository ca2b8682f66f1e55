"""The bounds Equipoise promises to keep, and whether it did."""

from collections.abc import Sequence

from import_time import ImportTimes
from timing import NOISE, Row

__all__ = ["TRUSTED_NOISE", "broken_bounds", "noise"]

TRUSTED_NOISE = 2.0
"""Microseconds by which the second hand-written row may be off; beyond that the machine was too busy for a verdict."""
MICROSECONDS = {"bare": 5.0, "full": 30.0, "evaluation": 5.0}
"""The most that a step may cost over the hand-written loop, by load."""
RATIOS = {"samples": 0.75, "compiled": 0.75}
"""The most that a step may take, as a multiple of the time of the eager hand-written loop with the same DataLoader."""
IMPORT_RATIO = 1.2


def noise(rows: Sequence[Row]) -> float:
    """Return the difference of the second hand-written rows, in microseconds per step."""
    return max((abs(row.over) for row in rows if row.name == NOISE), default=0.0)


def broken_bounds(rows: Sequence[Row], imports: ImportTimes | None) -> list[str]:
    """A sentence for each bound that Equipoise does not keep."""
    broken = []
    for row in rows:
        if row.name != "Equipoise":
            continue
        bound = MICROSECONDS.get(row.load)
        if bound is not None and row.over > bound:
            broken.append(
                f"{row.load}: {row.over:.1f} µs per step over the hand-written loop, at most {bound:.0f} are allowed"
            )
        if row.load == "accumulation" and row.over > TRUSTED_NOISE:
            broken.append(
                f"accumulation: {row.ratio:.3f} times the hand-written loop, at most 1.0 is allowed, within the noise"
            )
        ratio = RATIOS.get(row.load)
        if ratio is not None and row.ratio > ratio:
            broken.append(f"{row.load}: {row.ratio:.3f} times the hand-written loop, at most {ratio} is allowed")
    if imports is not None and imports.ratio > IMPORT_RATIO:
        broken.append(f"import: {imports.ratio:.2f} times `import torch`, at most {IMPORT_RATIO} are allowed")
    return broken
