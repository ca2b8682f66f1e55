"""Base of the pipeline strategy: duties that the other processes share, where there are any."""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from equipoise.parallel.strategy_optimizer import StrategyOptimizer
from equipoise.pipeline.processes.backend import ProcessBackend
from equipoise.pipeline.processes.launch import StageLaunch
from equipoise.pipeline.processes.process_optimizer import ProcessOptimizer
from equipoise.strategies.strategy import Strategy

__all__ = ["StagedStrategy"]

_OF_A_RUN = ("_network", "_split", "timeline")


class StagedStrategy(Strategy):
    """Runs in the first of several processes, whose parts in optimisers and states it knows; or in one process.

    Attributes:
        others: The other processes; None: all is computed in this one.
    """

    others: StageLaunch | None = None
    _split: ProcessBackend | None = None  # while other processes take part

    # Gradients and optimisers.

    def clip_gradients(self, optimizer: Optimizer, value: float, algorithm: str) -> None:
        """Clips gradients over all stages; see `Strategy.clip_gradients`."""
        if self._split is None:
            super().clip_gradients(optimizer, value, algorithm)
        else:
            self._split.clip(optimizer, value, algorithm)

    def setup_optimizer(self, optimizer: Optimizer) -> StrategyOptimizer:
        """Step the optimiser in all processes; see `Strategy.setup_optimizer`."""
        if self._split is None:
            return super().setup_optimizer(optimizer)
        return ProcessOptimizer(optimizer, self._split)

    # State.

    def module_state(self, module: nn.Module) -> dict[str, Any]:
        """The module's whole state, of all processes; see `Strategy.module_state`."""
        return super().module_state(module) if self._split is None else self._split.module_state()

    def load_module_state(self, module: nn.Module, state: dict[str, Any], strict: bool = True) -> None:
        """Loads the module's state in all processes; see `Strategy.load_module_state`."""
        if self._split is None:
            super().load_module_state(module, state, strict)
        else:
            self._split.load_module_state(state, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimiser's whole state, of all processes; see `Strategy.optimizer_state`."""
        return super().optimizer_state(optimizer) if self._split is None else self._split.optimizer_state(optimizer)

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Loads an optimiser's state in all processes; see `Strategy.load_optimizer_state`."""
        if self._split is None:
            super().load_optimizer_state(optimizer, state)
        else:
            self._split.load_optimizer_state(optimizer, state)

    # On its way to other processes.

    def __getstate__(self) -> dict[str, Any]:
        """The options; nothing that belongs to a run."""
        return {**super().__getstate__(), **dict.fromkeys(_OF_A_RUN)}
