"""One loss scale for gradients in several processes: an overflow in one skips the step in all.

torch's GradScaler looks at one optimiser's gradients and steps it if all of them are finite. Here the main process has
the scaler. The workers unscale their gradients by the same scale and report whether they were finite. For the scaler,
this report is one more gradient of the main process, which is zero or infinite.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

__all__ = ["JoinedOptimizer"]


class JoinedOptimizer:
    """An optimiser as a scaler sees it: its gradients, one more for those of the workers, and a step in all processes.

    Args:
        optimizer: The optimiser, which has a part of the gradients.
        step: Steps it in all processes.
        device: Device of the loss scale.
    """

    def __init__(self, optimizer: Optimizer, step: Callable[..., Any], device: torch.device) -> None:
        self._optimizer = optimizer
        self._step = step
        self._worker_parameter = nn.Parameter(torch.zeros((), device=device))
        self._is_unscaled = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimiser's groups, and one for the workers."""
        return [*self._optimizer.param_groups, {"params": [self._worker_parameter]}]

    def is_of(self, optimizer: Optimizer) -> bool:
        """Return True if this stands for an optimiser."""
        return self._optimizer is optimizer

    def unscale(self, scaler: GradScaler, unscale_workers: Callable[[float], bool]) -> None:
        """Unscale gradients, once for each step.

        Args:
            scaler: The scaler.
            unscale_workers: Unscales those of the workers by a scale, and returns True if all of them were finite.
        """
        if self._is_unscaled:
            return
        are_finite = unscale_workers(scaler.get_scale())
        value = 0.0 if are_finite else float("inf")
        self._worker_parameter.grad = torch.full_like(self._worker_parameter, value)
        # The scaler reads the groups only.
        scaler.unscale_(self)  # type: ignore[arg-type]
        self._is_unscaled = True

    def scaled_step(self, scaler: GradScaler, **kwargs: Any) -> Any:
        """Step in all processes, or in none if a gradient of any is not finite."""
        result = scaler.step(self, **kwargs)  # type: ignore[arg-type]
        self._is_unscaled = False
        return result

    def step(self, **kwargs: Any) -> Any:
        """Step the optimiser in all processes; the scaler calls this."""
        return self._step(self._optimizer, None, **kwargs)
