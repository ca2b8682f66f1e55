"""Modules of many kinds whose steps are captured."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.step_networks import CLASSES, FEATURES, Network

__all__ = [
    "Attention",
    "Averaging",
    "Convolution",
    "Dictionary",
    "Embedded",
    "Freezing",
    "Hooked",
    "HookedGradient",
    "HookedModule",
    "InPlaceBatch",
    "InPlaceData",
    "OnlyLoss",
    "Partial",
    "Scheduled",
    "Several",
    "Switching",
    "Validated",
]


class OnlyLoss(Network):
    """Returns the loss alone, and logs nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1])


class Dictionary(Network):
    """Batches that are dictionaries with texts."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {"features": batch[0], "rest": {"labels": batch[1]}, "name": "a text"}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((batch["features"], batch["rest"]["labels"]), batch_idx)


class Convolution(Network):
    """A convolution with its statistics, and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Unflatten(1, (1, FEATURES)),
            nn.Conv1d(1, 4, 3, padding=1),
            nn.BatchNorm1d(4),
            nn.ReLU(inplace=True),
            nn.MaxPool1d(2),
            nn.Flatten(),
            nn.Linear(12, CLASSES),
        )


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


class Several(Network):
    """Several losses, logged in many ways."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        losses = {"class": F.cross_entropy(logits, batch[1]), "size": logits.square().mean(), "max": logits.amax()}
        for name, value in losses.items():
            self.log(name, value, on_step=True, on_epoch=True, reduce_fx="max" if name == "max" else "mean")
        self.log("rows", float(len(batch[0])), on_epoch=True, reduce_fx="sum")
        return losses["class"] + 0.1 * losses["size"]


class Partial(Network):
    """Some parameters are frozen, and some are not used."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)
        self.net[0].requires_grad_(False)


class Averaging(Network):
    """A network that follows the other one, a memory, and the same memory as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Linear(FEATURES, 8)
        self.register_buffer("memory", torch.zeros(20, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            for parameter, target in zip(self.net[0].parameters(), self.target.parameters(), strict=True):
                target.lerp_(parameter, 0.1)
            self.memory[0] += 1
            self.memory[1] = batch[0].sum()
        result = super().training_step(batch, batch_idx)
        result["loss"] = result["loss"] + (self.net[0](batch[0]) - self.target(batch[0]).detach()).square().mean()
        return result


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


class HookedModule(Network):
    """A pure hook on a module."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].register_forward_hook(lambda module, inputs, output: output * 1.1)


class Hooked(Network):
    """Hooks of the trainer around the optimiser's step."""

    def on_after_backward(self) -> None:
        self.log("norm", self.net[4].weight.grad.norm())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.net[0].weight.grad.mul_(0.9)

    def configure_gradient_clipping(self, optimizer: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="value")


class Scheduled(Network):
    """Another rate in each step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.02)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Validated(Network):
    """Validates with the statistics of the training, and draws random numbers."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]) + torch.rand((), device=self.device))


class Freezing(Network):
    """Freezes a layer in the midst of the training."""

    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_step == 6:
            self.net[0].requires_grad_(False)


class Switching(Network):
    """Another mode of a layer from the second epoch on, and another factor."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch:
            self.net[1].eval()
            self.scale = 0.5
