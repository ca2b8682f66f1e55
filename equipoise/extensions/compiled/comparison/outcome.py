"""What a step or a block has computed, compared with what its program computes from the same state."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn

from equipoise.extensions.compiled.comparison.agreement import COMPARED, Tolerance, agree, difference_of, largest
from equipoise.parallel.snapshot import random_state
from equipoise.tree import leaves_of

__all__ = ["Outcome", "Result", "results_of"]


class Result(NamedTuple):
    """A value that was computed.

    Attributes:
        what: What it is, as the subject of a sentence.
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
        results.append(Result(f"the buffer {name}", buffer))
    for leaf in leaves_of(outputs):
        if isinstance(leaf, COMPARED):
            results.append(Result("an output", leaf))
    return results


class Outcome:
    """Copies of results, and the states of the generators after them.

    Args:
        results: The results, in the order in which they are compared.
    """

    def __init__(self, results: Iterable[Result]) -> None:
        self._results: list[Result] = []
        for result in results:
            value = result.value
            if isinstance(value, Tensor):
                value = value.detach().clone()
            self._results.append(result._replace(value=value))
        self._generators = random_state.capture()

    def first_difference(self, computed: "Outcome", tolerance: Tolerance) -> str | None:
        """Return what a program computes otherwise; None if the two agree.

        Args:
            computed: The outcome of the program.
            tolerance: The largest difference of tensors.
        """
        names = [result.what for result in self._results]
        if names != [result.what for result in computed._results]:
            return "it returns, logs or registers other values"
        gradients = [result.value for result in self._results if result.is_gradient and result.value is not None]
        floor = tolerance.floor * largest(gradients)
        of_gradients = Tolerance(tolerance.relative, floor)
        for expected, other in zip(self._results, computed._results, strict=True):
            allowed = of_gradients if expected.is_gradient else tolerance
            if not agree(expected.value, other.value, allowed):
                return f"{expected.what} differs{difference_of(expected.value, other.value)}"
        if not self._generators.equals(computed._generators):
            return "it draws random numbers otherwise"
        return None
