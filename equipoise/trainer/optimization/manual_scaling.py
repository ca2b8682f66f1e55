"""Steps by hand under a scaler of the loss."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.amp import GradScaler

from equipoise.parallel.strategy_optimizer import StrategyOptimizer
from equipoise.trainer.optimization.steps.scaled_gradients import ScaledGradients
from equipoise.trainer.optimization.steps.scaled_steps import ScaledSteps

__all__ = ["ManualScaling"]


class ManualScaling:
    """Unscales the gradients of each optimiser once before its step, and updates the scale between steps.

    Args:
        module: The user's module.
        scaler: The scaler of the loss.

    Attributes:
        steps: The steps, and whether the scaler has skipped them.
        gradients: Which gradients are scaled.
    """

    def __init__(self, module: nn.Module, scaler: GradScaler) -> None:
        self._scaler = scaler
        self.steps = ScaledSteps(scaler)
        self.gradients = ScaledGradients(module, scaler)
        # By identity: the optimisers whose gradients were unscaled before their step, and those that were stepped since
        # the scale was updated.
        self._unscaled: set[int] = set()
        self._stepped: set[int] = set()

    def unscale(self, strategy_optimizer: StrategyOptimizer) -> None:
        """Divide the gradients of an optimiser by the scale of the loss, once before its step."""
        optimizer = strategy_optimizer.optimizer
        if id(optimizer) not in self._unscaled and self.gradients.are_scaled(optimizer):
            strategy_optimizer.unscale(self._scaler)
            self._unscaled.add(id(optimizer))

    def step(self, strategy_optimizer: StrategyOptimizer, compute: Callable[[], Any], **kwargs: Any) -> Any:
        """Step an optimiser. The scale is updated when no other one holds gradients unscaled by the present scale.

        Args:
            strategy_optimizer: The optimiser.
            compute: Function that computes its gradients; a scaler takes no closure.
            kwargs: Other arguments of the optimiser's `step`.
        """
        optimizer = strategy_optimizer.optimizer
        key = id(optimizer)
        if key in self._stepped:
            # The scaler steps an optimiser once between two updates.
            self._update_scale()
        compute()
        if self.gradients.are_scaled(optimizer):
            result = self.steps.take(strategy_optimizer, **kwargs)
            self._unscaled.discard(key)
            self._stepped.add(key)
            if not self._unscaled:
                self._update_scale()
        else:
            result = self.steps.take_plain(strategy_optimizer, **kwargs)
        self.gradients.settle(optimizer)
        return result

    def _update_scale(self) -> None:
        self._scaler.update()
        self._unscaled.clear()
        self._stepped.clear()

    def close(self) -> None:
        """Remove the hooks on the optimisers and the parameters."""
        self.steps.close()
        self.gradients.close()
