"""Private names of the optimisers of Lightning.

Each name stands here with the reason why nothing public does; a test notices when one of them changes.
"""

from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer, do_nothing_closure
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer

__all__ = ["NO_CLOSURE", "closure_not_called", "wrap_optimizer"]

# What LightningOptimizer.step() passes on when the user gave no closure; public, but known by identity only.
NO_CLOSURE = do_nothing_closure


def wrap_optimizer(optimizer: Optimizer, strategy: Any) -> LightningOptimizer:
    """The optimiser that `self.optimizers()` returns; the class method that makes it is private, the class is not."""
    return LightningOptimizer._to_lightning_optimizer(optimizer, strategy)


def closure_not_called() -> Exception:
    """What Lightning raises, too, when `optimizer_step` did not run the closure."""
    return MisconfigurationException(
        "`optimizer_step` did not run its closure, which holds training_step, zero_grad and backward. Call"
        " `optimizer.step(closure=optimizer_closure)`"
        " or `optimizer_closure()` in it."
    )
