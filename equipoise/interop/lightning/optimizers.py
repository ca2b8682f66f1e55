"""Private names of the optimisers of Lightning.

Each name stands here with the reason why nothing public does; a test notices when one of them changes.
"""

from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer, do_nothing_closure
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer

__all__ = ["NO_CLOSURE", "closure_not_called", "wrap_optimizer"]

# LightningOptimizer.step() passes this on without a closure of the user. It is public, but known by identity only.
NO_CLOSURE = do_nothing_closure


def wrap_optimizer(optimizer: Optimizer, strategy: Any) -> LightningOptimizer:
    """Return the optimiser for `self.optimizers()`; the class is public, its class method that wraps is private."""
    return LightningOptimizer._to_lightning_optimizer(optimizer, strategy)


def closure_not_called() -> Exception:
    """Return the error, of Lightning's class, for an `optimizer_step` that did not run its closure."""
    return MisconfigurationException(
        "`optimizer_step` did not run its closure, which holds training_step, zero_grad and backward. Call"
        " `optimizer.step(closure=optimizer_closure)`"
        " or `optimizer_closure()` in it."
    )
