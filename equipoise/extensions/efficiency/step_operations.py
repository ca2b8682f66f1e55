"""Count the floating point operations of one training step."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

__all__ = ["StepOperations"]


class _NoModules(nullcontext[None]):
    """Follows no modules for torch's counter.

    Attributes:
        parents: Names to which the counter adds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parents = {"Global"}


class StepOperations:
    """Counts the operations of one step, forward and backward, and leaves all others alone.

    Torch's counter knows products of matrices, convolutions and attention, nearly all operations of a network. It sees
    what the thread of the step and its backward compute. Operations that checkpointing of activations repeats are
    counted as often as they are computed.

    Args:
        step: The number of the step, from 0. In a compiled run this step is computed without the compiler.

    Attributes:
        count: Multiplications and additions of the step; None before it.
    """

    def __init__(self, step: int) -> None:
        self.count: int | None = None
        self._steps_before = step

    def counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same, and counts in its turn."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.count is not None:
                return function(*args, **kwargs)
            if self._steps_before:
                self._steps_before -= 1
                return function(*args, **kwargs)
            counter = FlopCounterMode(display=False)
            # The sum is enough. What would follow the modules hooks into all of them, and compiled steps refuse hooks.
            counter.mod_tracker = _NoModules()  # type: ignore[assignment]
            with counter, torch.compiler.set_stance("force_eager"):
                result = function(*args, **kwargs)
            self.count = counter.get_total_flops()
            return result

        return counted
