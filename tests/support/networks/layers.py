"""Networks that a test writes in a line: layers in a row, or a function of layers."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tests.support.batches import CLASSES, FEATURES, TOKENS
from tests.support.networks.transparency import Base

__all__ = ["WIDTH", "Task", "layers", "network"]

WIDTH = TOKENS * FEATURES  # of the flattened features


def network(forward: Callable[..., Any], **attributes: Any) -> nn.Module:
    """A module with these layers and other attributes, whose forward is a function of itself and of its arguments."""
    module: nn.Module = type("Network", (nn.Module,), {"forward": forward})()
    for name, attribute in attributes.items():
        setattr(module, name, attribute)
    return module


class Task(Base):
    """Trains a network on features.

    Args:
        net: The network.
        step: Its training step, a function of the module and a batch. Default: the cross-entropy of what it returns.
    """

    def __init__(self, net: nn.Module, step: Callable[[Any, Any], Any] | None = None) -> None:
        super().__init__()
        self.net, self.step = net, step

    def forward(self, features: Tensor) -> Any:
        return self.net(features)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if self.step is None else self.step(self, batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self(batch["features"]).square().mean())


def layers(*between: nn.Module, step: Callable[[Any, Any], Any] | None = None) -> Task:
    """A module that trains layers of WIDTH features in a row, as `net.1`, `net.2` and so on, and a last one."""
    return Task(nn.Sequential(nn.Flatten(), *between, nn.Linear(WIDTH, CLASSES)), step)
