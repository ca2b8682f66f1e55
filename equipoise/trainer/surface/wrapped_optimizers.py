"""WrappedOptimizers: the optimisers in the form in which `self.optimizers()` gives them to users."""

from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer

from equipoise.interop.lightning.optimizers import wrap_optimizer
from equipoise.trainer.state.run_state import RunState

__all__ = ["WrappedOptimizers"]


class WrappedOptimizers:
    """Wraps the optimisers of a state, and wraps them anew when they change.

    Args:
        state: Holds the optimisers.
        strategy: The strategy in Lightning's form, whose `optimizer_step` the wrapped ones call.
    """

    def __init__(self, state: RunState, strategy: Any) -> None:
        self._state = state
        self._strategy = strategy
        self._wrapped: list[LightningOptimizer] = []

    def __reduce__(self) -> Any:
        """Pickle by the arguments: optimisers stay in their process."""
        return WrappedOptimizers, (self._state, self._strategy)

    def current(self) -> list[LightningOptimizer]:
        """Return the wrapped optimisers, the same objects as long as the optimisers are the same."""
        if [wrapped.optimizer for wrapped in self._wrapped] != self._state.optimizers:
            self._wrapped = [wrap_optimizer(optimizer, self._strategy) for optimizer in self._state.optimizers]
        return self._wrapped
