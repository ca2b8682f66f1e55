"""Agreement of all processes on what they compute, since all of them gather the weights of a unit together.

A process that left a unit out would meet the others in another exchange. One of another size ends in an error of the
backend, or never. One of the same size gives wrong weights without an error. So the processes compare which unit each
is about to compute, by numbers of a few bytes.
"""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from equipoise.errors import StepError
from equipoise.extensions.fsdp.units import Unit
from equipoise.extensions.fsdp.within_steps.user_steps import BACKWARD, RETURNED, ROOT, SUMMED
from equipoise.parallel.communication.object_exchange import exchange_number

__all__ = ["UnitCalls"]

# Numbers that processes exchange at the end of a forward, beside those of units and of what a step itself does.
_END_WITH_GRAPH = -1
_END_WITHOUT_GRAPH = -2

_TEXTS = {
    _END_WITH_GRAPH: "has ended its forward",
    BACKWARD: "runs a backward for other tensors than parameters",
    SUMMED: "runs a backward",
    RETURNED: "computes gradients of parameters by `torch.autograd.grad`",
    ROOT: "gathers weights of the root",
}


class UnitCalls:
    """The calls of units within a step, compared between the processes.

    Args:
        units: The units, the root last. Their hooks are removed by `close`.
        compare_each: Whether every call is compared before the unit's weights are gathered. False: the calls of a
            step are compared at the end of its forward.
        together: Number of successive ranks that compute each batch together. Default: 1.

    Attributes:
        count: The number of calls in the present step.
    """

    def __init__(self, units: Sequence[Unit], *, compare_each: bool, together: int = 1) -> None:
        self.count = 0
        self._together = together
        self._names = [unit.title for unit in units]
        self._compare_each = compare_each
        self._is_watching = False
        # A sum of the numbers of the units, in the order of their calls.
        self._sum = 0
        self._hooks = []
        for number, unit in enumerate(units[:-1]):
            # Before the hook of torch that gathers the weights.
            self._hooks.append(unit.module.register_forward_pre_hook(self._hook(number), prepend=True))

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, number: int) -> Any:
        def note_call(module: nn.Module, arguments: Any) -> None:
            if self._is_watching:
                self.count += 1
            self.note(number)

        return note_call

    def note(self, number: int) -> None:
        """Compare that all processes are about to do the same within a step.

        Args:
            number: The number of a unit, `BACKWARD`, `SUMMED`, `RETURNED` or `ROOT`.

        Raises:
            StepError: In all processes, if they are not.
        """
        if not self._is_watching:
            return
        self._sum = zlib.crc32(number.to_bytes(4, "little", signed=True), self._sum)
        if self._compare_each:
            self._check(exchange_number(number))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the calls of one forward."""
        self.count = 0
        self._sum = 0
        self._is_watching = True
        try:
            yield
        finally:
            self._is_watching = False

    def end(self, *, has_graph: bool) -> int:
        """End a forward in all processes.

        Args:
            has_graph: Whether this process can run a backward of it.

        Returns:
            The number of processes that can.

        Raises:
            StepError: If the processes have called different units.
        """
        kinds = exchange_number(_END_WITH_GRAPH if has_graph else _END_WITHOUT_GRAPH)
        # With or without a graph, a forward has ended.
        self._check([_END_WITH_GRAPH if kind == _END_WITHOUT_GRAPH else kind for kind in kinds])
        if not self._compare_each:
            sums = exchange_number(self._sum)
            if len(set(sums)) > 1:
                raise StepError(f"The processes have called different units in this step. {_RULE}")
        for first in range(0, len(kinds), self._together):
            if len(set(kinds[first : first + self._together])) > 1:
                raise StepError(
                    f"`training_step` returned None in some of the {self._together} processes that compute a batch"
                    " together, and a loss in others. Let what decides about it be the same in all of them."
                )
        return kinds.count(_END_WITH_GRAPH)

    def _check(self, numbers: Sequence[int]) -> None:
        """Check that all processes are at the same place."""
        first = numbers[0]
        for rank, number in enumerate(numbers):
            if number != first:
                raise StepError(f"Rank 0 {self._describe(first)}, while rank {rank} {self._describe(number)}. {_RULE}")

    def _describe(self, number: int) -> str:
        return _TEXTS.get(number) or f"is about to compute {self._names[number]}"


_RULE = (
    "Under strategy='fsdp' every process calls the same units in the same order, since all of them gather a unit's"
    " weights together. Let what decides about a call be the same in all processes: a random choice, such as LayerDrop,"
    " draws from a generator of its own with a common seed, `torch.rand((), generator=...)`. Or leave the unit out of"
    " `FSDPStrategy(units=[...])`, so that its weights stay with a unit around it."
)
