"""The optimisers that `self.optimizers()` returns, of Lightning's class but without its private names."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer

__all__ = ["closure_not_called", "no_closure", "wrap_optimizer"]


def no_closure() -> None:
    """Stand for the closure in a step without one; it is known by its identity."""


class _Wrapped(LightningOptimizer):
    """An optimiser that is stepped by a strategy in Lightning's form."""

    def __init__(self, optimizer: Optimizer, strategy: Any) -> None:
        super().__init__(optimizer)
        self.stepped_by = weakref.proxy(strategy)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step the optimiser, after a closure that computes the loss if there is one."""
        if closure is not None and not callable(closure):
            raise MisconfigurationException(f"`optimizer.step(closure)` takes a function, not {closure!r}.")
        closure = no_closure if closure is None else closure
        return self.stepped_by.optimizer_step(self.optimizer, closure, **kwargs)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Compute gradients for the parameters of this optimiser alone.

        Args:
            sync_grad: No effect: gradients are exchanged when they are needed.
        """
        with self.stepped_by.lightning_module.toggled_optimizer(self):
            yield


def wrap_optimizer(optimizer: Optimizer | LightningOptimizer, strategy: Any) -> LightningOptimizer:
    """Return an optimiser for `self.optimizers()`.

    Args:
        optimizer: The optimiser.
        strategy: The strategy in Lightning's form, whose `optimizer_step` steps it. Only a weak reference is kept.
    """
    if isinstance(optimizer, LightningOptimizer):
        optimizer = optimizer.optimizer
    return _Wrapped(optimizer, strategy)


def closure_not_called() -> Exception:
    """Return the error, of Lightning's class, for an `optimizer_step` that did not run its closure."""
    return MisconfigurationException(
        "`optimizer_step` did not run its closure, which holds training_step, zero_grad and backward. Call"
        " `optimizer.step(closure=optimizer_closure)`"
        " or `optimizer_closure()` in it."
    )
