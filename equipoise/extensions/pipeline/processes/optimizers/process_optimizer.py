"""An optimiser that is stepped in all processes of a pipeline, with one loss scale for all gradients.

torch's GradScaler looks at one optimiser's gradients and steps it if all of them are finite. Here the main process has
the scaler. The workers unscale their gradients by the same scale and report whether they were finite. For the scaler,
this report is one more gradient of the main process, which is zero or infinite. So an overflow in one process skips the
step in all.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from equipoise.extensions.pipeline.processes.optimizers.backend import ProcessBackend
from equipoise.parallel.strategy_optimizer import StrategyOptimizer

__all__ = ["ProcessOptimizer"]


class ProcessOptimizer(StrategyOptimizer):
    """Step an optimiser in all processes, or in none.

    A scaler sees it as an optimiser with one more gradient, for those of the workers.

    Args:
        optimizer: The user's optimiser, which steps the parameters of this process.
        backend: Steps the parameters of the other processes.
    """

    def __init__(self, optimizer: Optimizer, backend: ProcessBackend) -> None:
        super().__init__(optimizer)
        self._backend = backend
        self._worker_parameter = nn.Parameter(torch.zeros((), device=backend.device))
        self._is_unscaled = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimiser's groups, and one for the workers."""
        return [*self.optimizer.param_groups, {"params": [self._worker_parameter]}]

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step the optimiser in all processes."""
        return self._backend.optimizers.step(self.optimizer, closure, **kwargs)

    def unscale(self, scaler: GradScaler) -> None:
        """Unscale the gradients of all processes, once for each step, and note whether all of them are finite."""
        if self._is_unscaled:
            return
        are_finite = self._backend.unscale_workers(self.optimizer, scaler.get_scale())
        value = 0.0 if are_finite else float("inf")
        self._worker_parameter.grad = torch.full_like(self._worker_parameter, value)
        # The scaler reads the groups only.
        scaler.unscale_(self)  # type: ignore[arg-type]
        self._is_unscaled = True

    def scaled_step(self, scaler: GradScaler, **kwargs: Any) -> Any:
        """Step the optimiser in all processes, or in none if a gradient of any process is not finite."""
        # The trainer does not unscale where an optimiser's step could do so itself.
        self.unscale(scaler)
        result = scaler.step(self, **kwargs)  # type: ignore[arg-type]
        self._is_unscaled = False
        return result
