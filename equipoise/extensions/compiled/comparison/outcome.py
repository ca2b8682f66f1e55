"""Results of a step or a block, compared with those that its program computes from the same state."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from equipoise.parallel.equality import COMPARED, Tolerance, copied, gap_of
from equipoise.parallel.snapshot import random_state
from equipoise.tree import leaves_of

__all__ = ["Outcome", "Result", "results_of"]


class Result(NamedTuple):
    """A value that was computed.

    Attributes:
        what: A description, as the subject of a sentence.
        value: The value.
        is_gradient: Whether it is compared with the largest gradient of all.
    """

    what: str
    value: Any
    is_gradient: bool = False


def results_of(module: nn.Module, outputs: Any) -> list[Result]:
    """Return the tensors, numbers and texts among outputs, and the buffers of a module."""
    results = []
    for name, buffer in module.named_buffers():
        result = Result(f"the buffer {name}", buffer)
        results.append(result)
    # Metrics and other objects cannot be compared.
    for leaf in leaves_of(outputs):
        if isinstance(leaf, COMPARED):
            result = Result("an output", leaf)
            results.append(result)
    return results


class Outcome:
    """Copies of results, and the states of the generators after them.

    Args:
        results: The results, in the order in which they are compared.
    """

    def __init__(self, results: Iterable[Result]) -> None:
        self._results = [result._replace(value=copied(result.value)) for result in results]
        self._generators = random_state.capture()

    def first_difference(self, computed: "Outcome", tolerance: Tolerance) -> str | None:
        """Return what a program computes otherwise; None if the two agree.

        Args:
            computed: The outcome of the program.
            tolerance: The largest difference of tensors.
        """
        # 1. Both have the same results.
        names = [result.what for result in self._results]
        computed_names = [result.what for result in computed._results]
        if names != computed_names:
            return "it returns, logs or registers other values"

        # 2. A gradient that is nothing but rounding is compared with the largest one.
        of_gradients = tolerance.of_gradients(result.value for result in self._results if result.is_gradient)

        # 3. Their values, and the random numbers.
        for expected, other in zip(self._results, computed._results, strict=True):
            gap = gap_of(expected.value, other.value, of_gradients if expected.is_gradient else tolerance)
            if gap:
                return f"{expected.what} differs{gap}"
        if not self._generators.equals(computed._generators):
            return "it draws random numbers otherwise"
        return None
