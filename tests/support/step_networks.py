"""Modules and batches for tests of steps that are compiled or captured, which must compute as eager ones do."""

from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

__all__ = [
    "CLASSES",
    "FEATURES",
    "SIZES",
    "Apart",
    "Averaging",
    "ByHand",
    "Halving",
    "LoggingRate",
    "Network",
    "OfBatch",
    "Replacing",
    "Shared",
    "batches",
]

FEATURES, CLASSES = 6, 3
# The last batch of an epoch is shorter.
SIZES = [5] * 8 + [3]


def batches(sizes: Sequence[int] = SIZES, dtype: torch.dtype = torch.float64) -> DataLoader[Any]:
    """Batches of these sizes."""
    draw = torch.Generator().manual_seed(7)
    data = []
    for size in sizes:
        features = torch.randn(size, FEATURES, generator=draw, dtype=dtype)
        data.append((features, torch.randint(CLASSES, (size,), generator=draw)))
    return DataLoader(data, batch_size=None)  # type: ignore[arg-type]


class Network(L.LightningModule):
    """Dropout, statistics of batches, logged values, and outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, CLASSES)
        )
        self.scale = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, labels = batch
        logits = self.net(features) * self.scale
        loss = F.cross_entropy(logits, labels)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"accuracy": (logits.argmax(1) == labels).double().mean(), "number": 0.1})
        return {"loss": loss, "logits": logits}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class ByHand(Network):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Halving(Network):
    """Changes gradients in place, and logs one."""

    def on_after_backward(self) -> None:
        self.log("norm", self.net[0].weight.grad.norm())
        for parameter in self.parameters():
            parameter.grad.mul_(0.5)


class Replacing(Network):
    """Replaces gradients, and removes one."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            parameter.grad = parameter.grad * 0.5
        self.net[0].bias.grad = None


class Apart(Network):
    """The optimiser has not all parameters: gradients of the others are never zeroed."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(FEATURES, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        return {"loss": result["loss"] * self.other(batch[0]).square().mean()}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), 0.1)


class Shared(Network):
    """Two parameters whose gradients are one tensor, clipped in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(2))
        self.second = nn.Parameter(torch.ones(2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        return {"loss": result["loss"] + (self.first + self.second).sum()}


class LoggingRate(Network):
    """Logs the learning rate."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("rate", self.optimizers().param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01)


class OfBatch(Network):
    """The batch receives a gradient, too."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients: list[Tensor] = []

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0].requires_grad_(), batch[1]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.gradients.append(batch[0].grad)


class Averaging(Network):
    """Holds a network that follows the other one and a memory, and changes its batch, all in place."""

    memory: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Linear(FEATURES, 8)
        self.register_buffer("memory", torch.zeros(20, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            for parameter, target in zip(self.net[0].parameters(), self.target.parameters(), strict=True):
                target.lerp_(parameter, 0.1)
            batch[0].mul_(1.5)
            self.memory[0] += 1
            self.memory[1] = batch[0].sum()
        result = super().training_step(batch, batch_idx)
        result["loss"] = result["loss"] + (self.net[0](batch[0]) - self.target(batch[0]).detach()).square().mean()
        return result
