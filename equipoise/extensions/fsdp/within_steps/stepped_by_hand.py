"""An optimiser of a module in shards that the user steps by hand, within a step that continues afterwards."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.amp import GradScaler

from equipoise.parallel.strategy_optimizer import StrategyOptimizer

if TYPE_CHECKING:
    from equipoise.extensions.fsdp.sharded_module import ShardedModule

__all__ = ["SteppedByHand"]


class SteppedByHand(StrategyOptimizer):
    """Frees whole weights before each step, so that they are gathered anew where the rest of the user's step uses them.

    Args:
        stepped: The user's optimiser, as its shards are stepped.
        sharded: The module in shards.
    """

    def __init__(self, stepped: StrategyOptimizer, sharded: "ShardedModule") -> None:
        super().__init__(stepped.optimizer)
        self._stepped = stepped
        self._sharded = sharded

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step the optimiser; see `StrategyOptimizer.step`."""
        return self._in_shards(partial(self._stepped.step, closure, **kwargs))

    def unscale(self, scaler: GradScaler) -> None:
        """Divide the gradients by the scale of the loss; see `StrategyOptimizer.unscale`."""
        self._stepped.unscale(scaler)

    def scaled_step(self, scaler: GradScaler, **kwargs: Any) -> Any:
        """Step the optimiser unless a gradient is not finite; see `StrategyOptimizer.scaled_step`."""
        return self._in_shards(partial(self._stepped.scaled_step, scaler, **kwargs))

    def _in_shards(self, step: Callable[[], Any]) -> Any:
        self._sharded.steps.follow_switches()
        self._sharded.free_gathered()
        return step()
