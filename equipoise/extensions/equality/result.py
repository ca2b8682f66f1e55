"""Result of a comparison of two runs, in one sentence and as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from equipoise.extensions.equality.findings import LOGGED, Difference

__all__ = ["RunComparison"]


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """Two runs compared.

    Attributes:
        first: The path of the first run.
        second: The path of the second.
        atol: The absolute tolerance.
        rtol: The relative tolerance.
        logged_values: Number of compared pairs of logged values.
        steps: Number of steps at which logged values were compared.
        checkpoints: Number of compared pairs of checkpoints.
        tensors: Number of pairs of tensors, in all of them.
        differences: The differences, each name at its first step; sorted by step, at a step logged values first.
        not_compared: Values that could not be compared, each with the reason.
        left_out: Names that differ by nature, such as times and paths.
    """

    first: str
    second: str
    atol: float
    rtol: float
    logged_values: int
    steps: int
    checkpoints: int
    tensors: int
    differences: Sequence[Difference]
    not_compared: Sequence[str]
    left_out: Sequence[str]

    @property
    def equal(self) -> bool:
        """True if nothing that was compared differs."""
        return not self.differences

    @property
    def sentence(self) -> str:
        """The result in one sentence."""
        if self.equal:
            return self._equality()
        logged = [difference for difference in self.differences if difference.part == LOGGED]
        saved = [difference for difference in self.differences if difference.part != LOGGED]
        texts = []
        if logged:
            texts.append(_in_words(logged))
        if saved:
            first = saved[0]
            texts.append(f"{first.part} of step {first.step}: {_in_words(saved)}")
        return f"differ first at step {self.differences[0].step}: {'; '.join(texts)}"

    def _equality(self) -> str:
        how = "to the bit"
        if self.atol or self.rtol:
            how = f"within atol={self.atol:g} and rtol={self.rtol:g}"
        counts = []
        if self.logged_values:
            values = _count(self.logged_values, "logged value")
            counts.append(f"{values} at {_count(self.steps, 'step')}")
        if self.checkpoints:
            counts.append(_count(self.checkpoints, "checkpoint"))
            counts.append(_count(self.tensors, "tensor"))
        text = f"equal {how}: {', '.join(counts)}"
        if self.not_compared:
            text += "; something was not compared, see below"
        return text

    def to_json(self) -> str:
        """Return everything as JSON."""
        return json.dumps({"equal": self.equal, "sentence": self.sentence, **asdict(self)}, indent=2)


def _count(number: int, noun: str) -> str:
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}s"


def _in_words(differences: Sequence[Difference]) -> str:
    """Return the first difference, and how many there are beside it at its step."""
    first = differences[0]
    at_its_step = [difference for difference in differences if difference.step == first.step]
    further = len(at_its_step) - 1
    if not further:
        return str(first)
    return f"{first} and {further} more"
