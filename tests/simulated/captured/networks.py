"""Modules of many kinds whose steps are captured."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.step_networks import CLASSES, FEATURES, Network

__all__ = [
    "Attention",
    "Dictionary",
    "Embedded",
    "Hooked",
    "HookedGradient",
    "InPlaceBatch",
    "InPlaceData",
    "Partial",
    "Switching",
    "Validated",
]


class Dictionary(Network):
    """Batches that are dictionaries with texts."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {"features": batch[0], "rest": {"labels": batch[1]}, "name": "a text"}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((batch["features"], batch["rest"]["labels"]), batch_idx)


class Attention(Network):
    """A layer of a transformer, with dropout in it."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 12), nn.Unflatten(1, (3, 4)), layer, nn.Flatten(), nn.Linear(12, CLASSES)
        )


class Embedded(Network):
    """Tied weights: those of the embedding classify, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 8)
        self.net[4] = nn.Linear(8, CLASSES, bias=False)
        self.net[4].weight = self.embedding.weight

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        result["loss"] = result["loss"] + self.embedding(batch[1]).square().mean()
        return result


class Partial(Network):
    """Some parameters are frozen, and some are not used."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)
        self.net[0].requires_grad_(False)


class InPlaceBatch(Network):
    """Changes its batch, which a hook reads."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch[0].mul_(1.5)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.sums.append(batch[0].sum())
        self.log("changed", batch[0].sum())


class InPlaceData(InPlaceBatch):
    """Changes its batch without a trace."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch[0].data.mul_(1.5)
        return Network.training_step(self, batch, batch_idx)


class HookedGradient(Network):
    """A pure hook on a tensor in the midst: its operations are a part of the graph."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        doubled = result["loss"] * 2
        doubled.register_hook(lambda gradient: gradient * 3)
        return {"loss": doubled}


class Hooked(Network):
    """Hooks of the trainer around the optimiser's step."""

    def on_after_backward(self) -> None:
        self.log("norm", self.net[4].weight.grad.norm())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.net[0].weight.grad.mul_(0.9)

    def configure_gradient_clipping(self, optimizer: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="value")


class Validated(Network):
    """Validates with the statistics of the training, and draws random numbers."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]) + torch.rand((), device=self.device))


class Switching(Network):
    """Another mode of a layer from the second epoch on, and another factor."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch:
            self.net[1].eval()
            self.scale = 0.5
