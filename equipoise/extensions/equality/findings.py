"""Differences of two runs, collected while they are compared."""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from equipoise.extensions.equality.gaps import Gap

__all__ = ["LOGGED", "Difference", "Findings", "Place"]

LOGGED = "logged values"
"""The part of logged values; other parts are those of a checkpoint."""


class Place(NamedTuple):
    """A step, a part of a run, and a name in this part."""

    step: int
    part: str
    name: str = ""

    def __str__(self) -> str:
        """Return the place in words, without the step."""
        return f"{self.part}: {self.name or 'all'}"

    def below(self, key: str) -> "Place":
        """Return the place of an entry in what stands here."""
        if not self.name:
            return self._replace(name=key)
        return self._replace(name=f"{self.name}.{key}")


@dataclass(frozen=True)
class Difference:
    """A value or a tensor that differs, at the first step where it does.

    Attributes:
        step: The step.
        part: "logged values", "weights" (with buffers), "optimisers", "schedulers", or another part of a checkpoint.
        name: The name of the value or tensor in this part.
        first: The value of the first run, where the runs are furthest apart; or its shape, dtype or absence.
        second: The same of the second run.
        amount: The largest absolute difference; None where there is none, as for a text, NaN or another shape.
        place: The index of that element in the tensor; empty for a single value.
    """

    step: int
    part: str
    name: str
    first: str
    second: str
    amount: float | None = None
    place: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Return the difference in words."""
        if self.amount is None:
            return f"{self.name} {self.first} and {self.second}"
        if self.place:
            return f"{self.name} by at most {self.amount:.2g} at {self.place}"
        return f"{self.name} {self.first} and {self.second} ({self.amount:.2g})"


class Findings:
    """Collects differences, of each name the first, and what was not compared.

    Attributes:
        counts: Numbers of compared pairs, of "logged values", "steps", "checkpoints" and "tensors".
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._differences: dict[tuple[str, str], Difference] = {}
        # Dictionaries keep the order, in which nothing stands twice.
        self._not_compared: dict[str, None] = {}
        self._left_out: dict[str, None] = {}

    def has(self, place: Place) -> bool:
        """Return whether a value differs at a step before."""
        return (place.part, place.name) in self._differences

    def differs(self, place: Place, first: str, second: str) -> None:
        """Note two values that have no amount by which they differ, such as texts."""
        self._note(Difference(*place, first, second))

    def has_gap(self, place: Place, gap: Gap, index: tuple[int, ...] = ()) -> None:
        """Note two numbers or tensors that are apart.

        Args:
            place: Their place.
            gap: The largest difference.
            index: The element with it. Default: none, in a single value.
        """
        self._note(Difference(*place, gap.first, gap.second, gap.finite_amount, index))

    def _note(self, difference: Difference) -> None:
        self._differences.setdefault((difference.part, difference.name), difference)

    def not_compared(self, reason: str) -> None:
        """Note that something could not be compared."""
        self._not_compared[reason] = None

    def leave_out(self, name: str) -> None:
        """Note that a value differs by nature."""
        self._left_out[name] = None

    @property
    def differences(self) -> list[Difference]:
        """All differences, sorted by step; at a step logged values come first, and parts in the order of notes."""

        def order(difference: Difference) -> tuple[int, bool]:
            return difference.step, difference.part != LOGGED

        return sorted(self._differences.values(), key=order)

    @property
    def reasons(self) -> list[str]:
        """The reasons for which something was not compared."""
        return list(self._not_compared)

    @property
    def names_left_out(self) -> list[str]:
        """The names of values that differ by nature."""
        return list(self._left_out)
