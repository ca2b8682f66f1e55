"""Full states of a pipeline whose stages are in several processes."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.extensions.pipeline.processes.optimizers.backend import ProcessBackend
from equipoise.strategies.portable_state import PortableState

__all__ = ["PipelineState"]


class PipelineState(PortableState):
    """Gathers the state of all processes, and loads it in all of them.

    Args:
        backend: Optimisers and states of all processes.
    """

    def __init__(self, backend: ProcessBackend) -> None:
        self._backend = backend

    def module_state(self, module: nn.Module) -> dict[str, Any]:
        """Return the module's full state; see `PortableState.module_state`."""
        return self._backend.module_state()

    def load_module_state(self, module: nn.Module, state: dict[str, Any], strict: bool = True) -> None:
        """Load the module's state in all processes; see `PortableState.load_module_state`."""
        self._backend.load_module_state(state, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimiser's full state; see `PortableState.optimizer_state`."""
        return self._backend.optimizer_state(optimizer)

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load an optimiser's state in all processes; see `PortableState.load_optimizer_state`."""
        self._backend.load_optimizer_state(optimizer, state)

    def gradients(self, optimizers: Sequence[Optimizer], *, window_is_open: bool) -> list[Tensor | None]:
        """Return the gradients of a window, summed over the stages; see `PortableState.gradients`.

        They are loaded before the first step of a run, when all parameters are in the main process. A gradient then
        moves to the process of its stage with the parameter.
        """
        if not window_is_open:
            return []
        return self._backend.gradients_of(optimizers)
