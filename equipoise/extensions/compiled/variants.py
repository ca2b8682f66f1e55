"""The variants of a step: batches of one shape, at one position in the accumulation window.

A shape is compiled when it was seen a few times: the shorter batch at the end of an epoch is not worth it.
"""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from equipoise.extensions.compiled.comparison.costs import TrialCosts
from equipoise.extensions.compiled.interop.compiling import CompiledFunction
from equipoise.extensions.compiled.speed_comparison import SpeedComparison
from equipoise.extensions.compiled.step_program import StepProgram
from equipoise.extensions.compiled.ways import Compiling, Way
from equipoise.notices import rank_zero_warn
from equipoise.tree import entries_of

__all__ = ["STEPS_BEFORE", "Variant", "Variants", "shape_of"]

# Number of eager steps of a shape before it is compiled.
STEPS_BEFORE = 2
# Number of shapes that are compiled. All others stay eager.
MOST_VARIANTS = 8
# Number of shapes whose steps are counted.
_MOST_COUNTS = 1000
# Number of times that one shape is compiled, as when the step does something else for some numbers of batches. The
# compiler itself keeps no more.
MOST_TRIALS = 8
# Number of times in a row without a step by the program between them.
MOST_UNUSED = 4


class Variant:
    """Steps on batches of one shape.

    Args:
        function: The program, compiled or captured.

    Attributes:
        function: The program, compiled or captured.
        is_ready: True if a trial has agreed.
        is_refused: True if steps of this shape stay eager.
        comparison: The comparison of speed that is under way; None if there is none.
    """

    def __init__(self, function: CompiledFunction) -> None:
        self.function = function
        self._trials = 0
        self._unused = 0
        self.is_ready = False
        self.is_refused = False
        self.comparison: SpeedComparison | None = None

    def withdraw(self) -> None:
        """Note that no compiled program fits the present conditions, so that there is another trial."""
        self.is_ready = False

    def begin_trial(self) -> bool:
        """Count a trial, and return False if there were too many."""
        self._trials += 1
        self._unused += 1
        return self._trials <= MOST_TRIALS and self._unused <= MOST_UNUSED

    def approve(self) -> None:
        """Let the program compute later steps."""
        self.is_ready = True

    def refuse(self) -> None:
        """Let later steps stay eager."""
        self.is_ready = False
        self.is_refused = True

    def note_use(self) -> None:
        """Note that the program has computed a step."""
        self._unused = 0


class Variants:
    """The variants of a step.

    Args:
        program: The program of the step.
        way: The way in which programs are made faster. Default: they are compiled.
        costs: Notes what trials cost. Default: nobody does.

    Attributes:
        program: The program of the step.
        way: The way in which programs are made faster.
        costs: Notes what trials cost.
        is_given_up: True if no variant should be tried any more, where blocks of the network can be compiled instead.
    """

    def __init__(self, program: StepProgram, way: Way | None = None, costs: TrialCosts | None = None) -> None:
        self.program = program
        self.way = Compiling() if way is None else way
        self.costs = TrialCosts(torch.device("cpu"), {}, self.way.done) if costs is None else costs
        self.is_given_up = False
        self._reported: set[str] = set()
        self._variants: dict[Hashable, Variant] = {}
        # Number of steps of shapes that were not compiled yet.
        self._seen: dict[Hashable, int] = {}

    def of(self, batch: Any, begins_window: bool) -> Variant | None:
        """Return the variant of a batch; None if its step is eager.

        Args:
            batch: The batch.
            begins_window: Whether the window has no gradients yet.
        """
        key = (begins_window, shape_of(batch))
        variant = self._variants.get(key)
        if variant is None:
            variant = self._new_variant(key)
        if variant is None or variant.is_refused:
            return None
        return variant

    def refuse(self, variant: Variant, reason: str) -> None:
        """Let the steps of a variant stay eager, release the memory of its program, and warn."""
        variant.refuse()
        self.way.release_memory([variant.function])
        self.warn_once(reason)
        if not any(other.is_ready for other in self._variants.values()):
            self.give_up()

    def give_up(self) -> None:
        """Note that no variant should be tried any more, if blocks of the network can be compiled instead."""
        self.is_given_up = True

    def warn_once(self, reason: str) -> None:
        """Warn that steps stay eager, once for each reason."""
        if reason not in self._reported:
            self._reported.add(reason)
            rank_zero_warn(f"{self.way.done.capitalize()} steps: the training step stays eager, because {reason}.")

    def release_memory(self) -> None:
        """Release the memory that programs hold between two steps."""
        variants = list(self._variants.values())
        if self.way.release_memory([variant.function for variant in variants]):
            for variant in variants:
                variant.withdraw()

    def close(self) -> None:
        """Release all programs."""
        for variant in self._variants.values():
            variant.function.close()
        self._variants.clear()

    def _new_variant(self, key: Hashable) -> Variant | None:
        """Return a variant if the shape was seen often enough."""
        if not self._seen:
            self.costs.begin()
        # 1. Count the steps of this shape. Where each batch has another shape, the counts would fill the memory.
        if key not in self._seen and len(self._seen) >= _MOST_COUNTS:
            self._seen.clear()
        steps = self._seen.get(key, 0)
        self._seen[key] = steps + 1
        if steps < STEPS_BEFORE:
            return None

        # 2. Compile a few shapes only.
        if len(self._variants) >= MOST_VARIANTS:
            self.warn_once(
                f"it was {self.way.done} for {MOST_VARIANTS} shapes of batches already. Pad batches to a few lengths"
            )
            return None
        variant = Variant(self.way.function(self.program))
        self._variants[key] = variant
        return variant


def shape_of(batch: Any) -> Hashable:
    """Return the shapes of all tensors of a batch."""
    # The quick way for the usual batches.
    if type(batch) in (tuple, list):
        shapes = []
        for entry in batch:
            if type(entry) is not Tensor:
                break
            shapes.append(entry.shape)
        else:
            return tuple(shapes)
    return tuple((path, tensor.shape) for path, tensor in entries_of(batch))
