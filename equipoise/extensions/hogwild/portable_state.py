"""Checkpoints of parameters that all processes change: they meet before, and what is written is a copy."""

import copy
from typing import Any

from torch import nn
from torch.optim import Optimizer

from equipoise.parallel.communication.processes import Processes
from equipoise.strategies.portable_state import PortableState

__all__ = ["SharedState"]


class SharedState(PortableState):
    """Full states of shared parameters."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes

    def prepare(self) -> None:
        """Wait until no process steps any more; see `PortableState.prepare`."""
        self._processes.barrier("shared state")

    def module_state(self, module: nn.Module) -> dict[str, Any]:
        """Return a copy of the module's state, since a plugin may write it while the processes continue."""
        return copy.deepcopy(super().module_state(module))

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return a copy of an optimiser's state; that of the main process, unless it is shared."""
        return copy.deepcopy(super().optimizer_state(optimizer))
