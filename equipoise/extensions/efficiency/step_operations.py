"""Count the floating point operations of one training step."""

from collections.abc import Callable
from typing import Any

import torch

from equipoise.extensions.efficiency.operation_counter import OperationCounter

__all__ = ["StepOperations"]

# Steps that are tried until one of them has operations.
_MOST_TRIES = 5


class StepOperations:
    """Counts the operations of one step, forward and backward, and leaves all others alone.

    A step lasts from the end of one batch to that of the next, so an optimiser may compute its batch several times. A
    step that raises an error, or that has no operations, is not counted; the next one is counted instead.

    Args:
        step: The number of the step, from 0. In a compiled run this step is computed without the compiler's backend.

    Attributes:
        count: Multiplications and additions of the step; None before it.
        why_not: The reason why operations cannot be counted; empty if they can.
    """

    def __init__(self, step: int) -> None:
        self.count: int | None = None
        self.why_not = ""
        self._steps_before = step
        self._tries = 0
        self._begin()

    def _begin(self) -> None:
        self._of_step = 0
        self._has_raised = False

    @property
    def is_pending(self) -> bool:
        """True until the operations are counted, or it is known that they cannot be."""
        return self.count is None and not self.why_not

    def counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same, and counts in its turn."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._steps_before or not self.is_pending:
                return function(*args, **kwargs)
            counter = OperationCounter()
            # What the compiler made would be seen as one unknown operation. Without Dynamo, though, `torch.cond` would
            # lose the gradients of what its branches take from outside.
            stance = torch.compiler.set_stance("default", force_backend="eager")
            with counter, stance:
                result = self.watching(function)(*args, **kwargs)
            self._of_step += counter.count
            self.why_not = counter.why_not
            return result

        return counted

    def watching(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same, and notes an error: what was computed before it may be repeated."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except BaseException:
                self._has_raised = True
                raise

        return watched

    def end_step(self) -> None:
        """Note the end of a step."""
        if self._steps_before:
            self._steps_before -= 1
        elif self.is_pending:
            self._tries += 1
            if self._of_step and not self._has_raised:
                self.count = self._of_step
            elif self._tries == _MOST_TRIES:
                self.why_not = f"{_MOST_TRIES} steps in turn ran out of memory, or had no operation that torch counts"
        self._begin()
