"""A classifier that normalises, and the loop that a trainer makes of a precision: for tests of precisions."""

from contextlib import nullcontext
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from equipoise.precision import Precision

__all__ = ["NAMES", "Classifier", "fit", "make_batches", "make_module"]

NAMES = ["32-true", "16-mixed", "bf16-mixed", "16-true", "16-true-norm32", "bf16-true", "64-true"]


class Classifier(L.LightningModule):
    """Convolution, batch statistics, normalisation, a buffer, and a tensor made in forward in the default dtype."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__()
        self.optimizer = optimizer
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.head = nn.Sequential(nn.LayerNorm(4 * 6 * 6), nn.Linear(4 * 6 * 6, 5))
        self.register_buffer("offset", torch.linspace(0, 1, 5))
        self.losses: list[Tensor] = []

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        logits = self(images) + self.offset
        loss = nn.functional.cross_entropy(logits + torch.full((5,), 0.1), labels)
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return torch.optim.Adam(self.parameters(), lr=0.01, eps=1e-4)


def make_module(optimizer: str = "sgd", kind: type[Classifier] = Classifier) -> Classifier:
    """Return a classifier with the same weights in each call."""
    torch.manual_seed(3)
    return kind(optimizer)


def make_batches(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Return batches of six images and labels."""
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randn(6, 1, 8, 8, generator=generator), torch.randint(0, 5, (6,), generator=generator))
        for _ in range(count)
    ]


def fit(module: Classifier, precision: Precision, batches: list[Any]) -> Classifier:
    """Train a module in a precision, by the loop that a trainer makes of it."""
    precision.convert_module(module)
    optimizer = module.configure_optimizers()
    scaler, context = precision.scaler, precision.forward_context or nullcontext
    for index, batch in enumerate(batches):
        if precision.convert_input is not None:
            batch = precision.convert_input(batch)
        with context():
            loss = module.training_step(batch, index)
        optimizer.zero_grad()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    return module
