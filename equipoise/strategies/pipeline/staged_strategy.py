"""Base of the pipeline strategy: duties that the other processes share, where there are any."""

from typing import Any

from torch.optim import Optimizer

from equipoise.parallel.strategy_optimizer import StrategyOptimizer
from equipoise.pipeline.processes.backend import ProcessBackend
from equipoise.pipeline.processes.launch import StageLaunch
from equipoise.pipeline.processes.process_optimizer import ProcessOptimizer
from equipoise.strategies.pipeline.portable_state import PipelineState
from equipoise.strategies.portable_state import PortableState
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

    @property
    def portable(self) -> PortableState:
        """Full states of the module; see `Strategy.portable`."""
        if self._split is None:
            return super().portable
        return PipelineState(self._split)

    # On its way to other processes.

    def __getstate__(self) -> dict[str, Any]:
        """The options; nothing that belongs to a run."""
        return {**super().__getstate__(), **dict.fromkeys(_OF_A_RUN)}
