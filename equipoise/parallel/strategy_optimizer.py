"""An optimiser as a strategy steps it."""

from collections.abc import Callable
from typing import Any

from torch.amp import GradScaler
from torch.optim import Optimizer

__all__ = ["StrategyOptimizer", "StrategyOptimizers"]


class StrategyOptimizer:
    """The ways in which a strategy steps one optimiser. Default: the optimiser's own, in this process.

    Args:
        optimizer: The user's optimiser. It stays the object that the user sees.

    Attributes:
        optimizer: The user's optimiser.

    Example:
        >>> import torch
        >>> parameter = torch.nn.Parameter(torch.tensor([1.0]))
        >>> parameter.grad = torch.tensor([2.0])
        >>> StrategyOptimizer(torch.optim.SGD([parameter], lr=0.25)).step()
        >>> parameter.item()
        0.5
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step the optimiser.

        Args:
            closure: Function that computes the loss and the gradients. None: the gradients exist already.
            kwargs: Other arguments of the optimiser's `step`.

        Returns:
            The result of the optimiser's `step`.
        """
        if closure is None:
            return self.optimizer.step(**kwargs)
        return self.optimizer.step(closure=closure, **kwargs)

    def unscale(self, scaler: GradScaler) -> None:
        """Divide the gradients by the scale of the loss, and note whether all of them are finite."""
        scaler.unscale_(self.optimizer)

    def scaled_step(self, scaler: GradScaler, **kwargs: Any) -> Any:
        """Step the optimiser unless one of its gradients, unscaled or not yet, is not finite."""
        return scaler.step(self.optimizer, **kwargs)

    def skip(self) -> None:
        """Leave out a scaled step for which there are no gradients: this process had no loss in the window."""


class StrategyOptimizers:
    """The optimisers of a run as the strategy steps them. Each is set up once, when it is first used.

    Args:
        setup: Function that sets up an optimiser, such as `Strategy.setup_optimizer`.
    """

    def __init__(self, setup: Callable[[Optimizer], StrategyOptimizer]) -> None:
        self._setup = setup
        # By identity: objects that behave like optimisers may not be hashable. Each entry keeps its optimiser alive.
        self._by_id: dict[int, StrategyOptimizer] = {}

    def of(self, optimizer: Optimizer) -> StrategyOptimizer:
        """Return an optimiser as the strategy steps it."""
        strategy_optimizer = self._by_id.get(id(optimizer))
        if strategy_optimizer is None:
            strategy_optimizer = self._setup(optimizer)
            self._by_id[id(optimizer)] = strategy_optimizer
        return strategy_optimizer
