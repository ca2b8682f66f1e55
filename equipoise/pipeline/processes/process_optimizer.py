"""An optimiser that is stepped in all processes of a pipeline."""

from collections.abc import Callable
from typing import Any

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from equipoise.parallel.strategy_optimizer import StrategyOptimizer
from equipoise.pipeline.processes.backend import ProcessBackend

__all__ = ["ProcessOptimizer"]


class ProcessOptimizer(StrategyOptimizer):
    """Step an optimiser in all processes, or in none.

    Args:
        optimizer: The user's optimiser, which steps the parameters of this process.
        backend: Steps the parameters of the other processes.
    """

    def __init__(self, optimizer: Optimizer, backend: ProcessBackend) -> None:
        super().__init__(optimizer)
        self._backend = backend

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step the optimiser in all processes."""
        return self._backend.optimizer_step(self.optimizer, closure, **kwargs)

    def unscale(self, scaler: GradScaler) -> None:
        """Unscale the gradients of all processes, and note whether all of them are finite."""
        self._backend.unscale(scaler, self.optimizer)

    def scaled_step(self, scaler: GradScaler, **kwargs: Any) -> Any:
        """Step the optimiser in all processes, or in none if a gradient of any process is not finite."""
        return self._backend.scaled_step(scaler, self.optimizer, **kwargs)
