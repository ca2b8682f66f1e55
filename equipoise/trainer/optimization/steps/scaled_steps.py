"""Steps of optimisers under a scaler of the loss, which skips those whose gradients are not finite."""

from typing import Any

from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from equipoise.parallel.strategy_optimizer import StrategyOptimizer

__all__ = ["ScaledSteps"]


class ScaledSteps:
    """Takes steps, and tells whether the scaler has skipped them.

    The scaler waits for the device by itself, and then calls the optimiser or not: a hook of the optimiser notices it.
    A fused optimiser is always called and decides on the device, so its decision is read once a caller asks.

    Attributes:
        scaler: The scaler, whose scale the caller updates.
    """

    def __init__(self, scaler: GradScaler) -> None:
        self.scaler = scaler
        # By identity: the hooks of the optimisers; None where there can be none.
        self._hooks: dict[int, RemovableHandle | None] = {}
        self._number = 0
        # One entry for each call of an optimiser: the overflows of a fused one, on its device; None for any other.
        self._overflows: list[Tensor | None] = []

    @property
    def are_skipped(self) -> bool:
        """True if the scaler has skipped all steps since `begin`; False if there was none."""
        return self._number > 0 and all(overflow is not None and bool(overflow) for overflow in self._overflows)

    def begin(self) -> None:
        """Forget earlier steps."""
        self._number = 0
        self._overflows.clear()

    def take(self, strategy_optimizer: StrategyOptimizer, **kwargs: Any) -> Any:
        """Step an optimiser unless one of its gradients is not finite."""
        optimizer = strategy_optimizer.optimizer
        key = id(optimizer)
        if key not in self._hooks:
            self._hooks[key] = self._watch(optimizer)
        self._number += 1
        # Without a hook the step counts as taken.
        if self._hooks[key] is None:
            self._overflows.append(None)
        return strategy_optimizer.scaled_step(self.scaler, **kwargs)

    def take_plain(self, strategy_optimizer: StrategyOptimizer, **kwargs: Any) -> Any:
        """Step an optimiser whose gradients are of their own size."""
        self._number += 1
        self._overflows.append(None)
        return strategy_optimizer.step(**kwargs)

    def _watch(self, optimizer: Optimizer) -> RemovableHandle | None:
        """Register the hook. An object that only looks like an optimiser may have none."""
        try:
            return optimizer.register_step_post_hook(self._note_step)
        except AttributeError:
            return None

    def _note_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # The scaler lends this to a fused optimiser during its step.
        self._overflows.append(getattr(optimizer, "found_inf", None))

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks.values():
            if hook is not None:
                hook.remove()
        self._hooks.clear()
