"""Two recorded runs compared: value by value, in the order in which they were computed."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from equipoise.extensions.verification.recording import Batch, Recorder, Step, Tensors
from equipoise.parallel.equality import Gap, Tolerance, gap_of

__all__ = ["BUFFER", "GRADIENT", "KINDS", "LOGGED", "LOSS", "NUMBER", "WEIGHT", "Finding", "compare"]

LOSS = "loss"
GRADIENT = "gradient"
WEIGHT = "weight"
BUFFER = "buffer"
LOGGED = "logged value"
NUMBER = "number of optimiser steps"
KINDS = (LOSS, GRADIENT, WEIGHT, BUFFER, LOGGED)
# Roundings of the largest weight, as an update of a small one is added to it.
_ROUNDINGS = 8


class Finding(NamedTuple):
    """A value that both runs have computed.

    Attributes:
        kind: "loss", "gradient", "weight" (after the step), "buffer", "logged value" or "number of optimiser steps".
        step: Number of the step, from 1.
        name: Its name; empty for the loss.
        gap: How far the two are apart.
    """

    kind: str
    step: int
    name: str
    gap: Gap

    def __str__(self) -> str:
        """Return the difference as a sentence without its point."""
        of = f"the {self.kind}"
        if self.name:
            of += f" {self.name!r}"
        place = ""
        if self.gap.place:
            place = f", most at {list(self.gap.place)}"
        when = "in step"
        if self.kind in (WEIGHT, BUFFER, NUMBER):
            when = "after step"
        return f"{when} {self.step} {of} differs{self.gap}{place}"


@dataclass
class _Comparison:
    """Compares the records of a run and of one device.

    Attributes:
        reference: The record of one device.
        recorded: The record of the run.
        tolerance: The largest difference that rounding causes.
    """

    reference: Recorder
    recorded: Recorder
    tolerance: Tolerance

    def findings(self) -> Iterator[Finding]:
        """Yield all values in their order."""
        before = self.reference.initial
        pairs = list(zip(self.reference.steps, self.recorded.steps, strict=False))
        begin = 0
        for number, (reference, recorded) in enumerate(pairs):
            step = number + 1
            yield from self._of_batches(begin, reference.batch + 1, step)
            begin = max(begin, reference.batch + 1)
            yield from self._of_gradients(reference, recorded, step)
            states = (self.reference.final, self.recorded.final)
            if step < len(pairs):
                states = (pairs[step][0].state, pairs[step][1].state)
            yield from self._of_state(before, *states, step)
            before = states[0]
        if len(self.reference.steps) != len(self.recorded.steps):
            yield Finding(NUMBER, len(pairs), "", gap_of(0, 1))

    def _of_batches(self, begin: int, end: int, step: int) -> Iterator[Finding]:
        for number in range(begin, end):
            of_processes = [batches[number] for batches in self.recorded.batches]
            (reference,) = (batches[number] for batches in self.reference.batches)
            loss = _mean([(batch, batch.loss) for batch in of_processes])
            if loss is not None:
                expected = _mean([(reference, reference.loss)])
                gap = gap_of(expected, loss, self.tolerance)
                yield Finding(LOSS, step, "", gap)
            for name, value in reference.logged.items():
                logged = _mean([(batch, batch.logged.get(name)) for batch in of_processes])
                if logged is not None:
                    gap = gap_of(torch.tensor(value), logged, self.tolerance)
                    yield Finding(LOGGED, step, name, gap)

    def _of_gradients(self, reference: Step, recorded: Step, step: int) -> Iterator[Finding]:
        tolerance = self.tolerance.of_gradients(reference.gradients.values())
        if all(gradient is None for gradient in recorded.gradients.values()):
            # They were used and freed in the backward.
            return
        for name, expected in reference.gradients.items():
            computed = recorded.gradients.get(name)
            # Strategies fill in zeros for parameters that a step does not use.
            expected, computed = _zeros_for_none(expected, computed)
            if expected is not None:
                yield Finding(GRADIENT, step, name, gap_of(expected, computed, tolerance))

    def _of_state(self, before: Tensors, reference: Tensors, recorded: Tensors, step: int) -> Iterator[Finding]:
        for name, expected in reference.items():
            computed = recorded.get(name)
            kind = BUFFER
            if name in self.reference.parameters:
                kind = WEIGHT
            tolerance = self.tolerance
            if kind == WEIGHT and isinstance(computed, Tensor) and expected.is_floating_point():
                # Of the step, not of the weight, beside which a step is small.
                rounding = (
                    _ROUNDINGS
                    * torch.finfo(expected.dtype).eps
                    * float(expected.abs().max() if expected.numel() else 0)
                )
                tolerance = Tolerance(tolerance.relative, rounding)
                start = before[name].double()
                expected = expected.double() - start
                computed = computed.double() - start
            yield Finding(kind, step, name, gap_of(expected, computed, tolerance))


def _zeros_for_none(one: Tensor | None, other: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    if one is None and other is not None:
        return torch.zeros_like(other), other
    if other is None and one is not None:
        return one, torch.zeros_like(one)
    return one, other


def _mean(values: list[tuple[Batch, Any]]) -> Tensor | None:
    """Return the mean over processes, weighted by their samples; None without any. That of equal values is exact."""
    present = [
        (sum(batch.sizes), torch.as_tensor(value, dtype=torch.float64)) for batch, value in values if value is not None
    ]
    total = sum(size for size, _ in present)
    if not total:
        return None
    _, first = present[0]
    are_equal = [torch.equal(value, first) for _, value in present]
    if all(are_equal):
        return first
    return torch.stack([size * value for size, value in present]).sum(0) / total


def compare(reference: Recorder, recorded: Recorder, tolerance: Tolerance) -> list[Finding]:
    """Return all values of two runs in the order in which they were computed.

    Args:
        reference: The run on one device.
        recorded: The user's run.
        tolerance: The largest difference that rounding causes.
    """
    return list(_Comparison(reference, recorded, tolerance).findings())
