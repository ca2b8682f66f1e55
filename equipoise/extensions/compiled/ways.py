"""The two ways to a faster step: compiled to one program, or captured as a CUDA graph.

Both are traced by torch's compiler, tried against the eager step, and used for batches of one shape.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from equipoise.extensions.compiled.captured.captured_function import CapturedFunction
from equipoise.extensions.compiled.captured.captured_graph import GraphPool
from equipoise.extensions.compiled.interop.compiling import CompiledFunction
from equipoise.extensions.compiled.step_program import StepProgram
from equipoise.parallel.equality import EXACT, Tolerance, tolerance_of

__all__ = ["Capturing", "Compiling", "Way"]


class Way(ABC):
    """A way to a faster step.

    Attributes:
        done: Past participle, for messages: "compiled" or "captured".
        only_if_faster: Whether programs are used only where they are faster.
    """

    done: str
    only_if_faster: bool = False

    @abstractmethod
    def function(self, program: StepProgram) -> CompiledFunction:
        """Return the faster form of a program, for one shape of batches."""

    @abstractmethod
    def tolerance(self, dtype: torch.dtype) -> Tolerance:
        """Return the largest difference between the program and the eager step, for a dtype of the computation."""

    def release_memory(self, functions: Sequence[CompiledFunction]) -> bool:
        """Release memory that these functions hold between two steps. Return True if they need a new trial then."""
        return False


class Compiling(Way):
    """Kernels of torch's compiler.

    Args:
        only_if_faster: Whether programs are used only where they are faster. Default: False.
    """

    done = "compiled"

    def __init__(self, *, only_if_faster: bool = False) -> None:
        self.only_if_faster = only_if_faster

    def function(self, program: StepProgram) -> CompiledFunction:
        """Return the compiled program."""
        return CompiledFunction(program.compute, program.own_attributes)

    def tolerance(self, dtype: torch.dtype) -> Tolerance:
        """Return the rounding of a dtype."""
        return tolerance_of([dtype])


class Capturing(Way):
    """Torch's own kernels, replayed as a CUDA graph. The results are the same to the bit."""

    done = "captured"

    def __init__(self, device: torch.device) -> None:
        self._pool = GraphPool(device)

    def function(self, program: StepProgram) -> CompiledFunction:
        """Return the program whose graphs are captured."""
        return CapturedFunction(
            program.compute,
            program.own_attributes,
            pool=self._pool,
            passing=program.passing_tensors,
            gradients=program.gradients,
        )

    def tolerance(self, dtype: torch.dtype) -> Tolerance:
        """Return the same for all dtypes: there is no difference."""
        return EXACT

    def release_memory(self, functions: Sequence[CompiledFunction]) -> bool:
        """Release the graphs of these functions."""
        for function in functions:
            assert isinstance(function, CapturedFunction)
            function.release()
        return True
