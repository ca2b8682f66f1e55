"""Modules of unusual build: nested, compiled, shared; `tests/trainer/hooks` has the ways to override a hook."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from ..data import CLASSES
from ..harness import Case, parity
from ..modules import Classifier, network


class Inner(L.LightningModule):
    """A module inside another: it shares the trainer, but its hooks and its optimisers are nobody's."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, features: Tensor) -> Tensor:
        logits = self.net(features)
        return logits * 2 if self.trainer.training else logits

    def on_train_epoch_end(self) -> None:
        raise AssertionError("the hooks of an inner module are not the trainer's to call")


class Outer(Classifier):
    """Computes and logs through a module inside."""

    def __init__(self, inner: type[Inner] = Inner) -> None:
        super().__init__()
        self.inner = inner()

    def forward(self, features: Tensor) -> Tensor:
        return self.inner(features)


class LoggingInner(Inner):
    """Logs by itself, which Lightning refuses of an inner module."""

    def forward(self, features: Tensor) -> Tensor:
        self.log("inner", 1.0)
        return super().forward(features)


class Silent(Classifier):
    """Logs outside of what is compiled."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("train_loss", outputs["loss"], on_step=True, on_epoch=True)


def compiled(module: Any) -> Any:
    return torch.compile(module, backend="eager")


class Tied(Classifier):
    """Two layers share a weight, and one parameter is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, CLASSES))
        self.net[2].weight = self.net[0].weight
        self.net[4].bias.requires_grad_(False)


CASES = [
    Case(name="nested", module=Outer),
    Case(name="nested-logging", module=lambda: Outer(LoggingInner), raises=MisconfigurationException),
    Case(name="compiled", module=lambda: compiled(Silent()), watch=False),
    Case(name="tied-and-frozen", module=Tied),
]

test_parity = parity(CASES)
