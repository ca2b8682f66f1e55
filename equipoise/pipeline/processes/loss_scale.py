"""One loss scale for gradients in several processes: an overflow in one skips the step in all.

torch's GradScaler looks at one optimiser's gradients and steps it if all of them are finite. Here the first process has
the scaler; the others unscale what they have with the same scale and say whether it was finite, and their answers stand
among the first one's gradients as one more, which is zero or infinite.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

__all__ = ["JoinedOptimizer", "unscale"]


def unscale(parameters: Sequence[Tensor], scale: float, device: torch.device) -> bool:
    """Divides gradients by a scale as torch's scaler does; returns whether all were finite.

    Args:
        parameters: Whose gradients; each has one.
        scale: The scale.
        device: Where they are.

    Example:
        >>> weight = torch.zeros(2)
        >>> weight.grad = torch.tensor([4.0, 2.0])
        >>> unscale([weight], 2.0, weight.device), weight.grad
        (True, tensor([2., 1.]))
    """
    if not parameters:  # which a scaler takes for a mistake
        return True
    scaler = GradScaler(device.type, init_scale=scale)
    scaler.scale(torch.zeros((), device=device))  # with which it makes its scale
    finite: list[bool] = []
    seen: Any = _Seen([{"params": parameters}], lambda: finite.append(True))
    scaler.unscale_(seen)
    scaler.step(seen)
    return bool(finite)


class _Seen:
    """Of an optimiser what a scaler needs."""

    def __init__(self, groups: list[dict[str, Any]], step: Callable[..., Any]) -> None:
        self.param_groups, self.step = groups, step


class JoinedOptimizer:
    """An optimiser as a scaler sees it: with its gradients, one more for those of other processes, and a step of all.

    Args:
        optimizer: The optimiser, which has a part of the gradients.
        step: Steps it in all processes.
        device: That of the scale.
    """

    def __init__(self, optimizer: Optimizer, step: Callable[..., Any], device: torch.device) -> None:
        self._optimizer, self._step = optimizer, step
        self._others = nn.Parameter(torch.zeros((), device=device))
        self._is_unscaled = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimiser's, and what stands for the others'."""
        return [*self._optimizer.param_groups, {"params": [self._others]}]

    def is_of(self, optimizer: Optimizer) -> bool:
        """Whether it stands for an optimiser."""
        return self._optimizer is optimizer

    def unscale(self, scaler: GradScaler, unscale_others: Callable[[float], bool]) -> None:
        """Unscales gradients, once for each step.

        Args:
            scaler: The scaler.
            unscale_others: Unscales those of other processes; returns whether all were finite.
        """
        if self._is_unscaled:
            return
        finite = unscale_others(scaler.get_scale())
        self._others.grad = torch.full_like(self._others, 0.0 if finite else float("inf"))
        scaler.unscale_(self)  # type: ignore[arg-type]  # which asks for groups alone
        self._is_unscaled = True

    def scaled_step(self, scaler: GradScaler, **kwargs: Any) -> Any:
        """Steps in all processes, or in none where a gradient of any is not finite."""
        answer = scaler.step(self, **kwargs)  # type: ignore[arg-type]
        self._is_unscaled = False
        return answer

    def step(self, **kwargs: Any) -> Any:
        """Called by the scaler."""
        return self._step(self._optimizer, None, **kwargs)
