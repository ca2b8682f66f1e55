"""Models of transformers and timm, built from their configurations: those of the campaign of real models."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The catalogue of that campaign knows sizes and batches of each model.
sys.path.append(str(Path(__file__).parents[1] / "real_models"))

from libraries import absence

__all__ = ["LibraryTask", "Model", "absence", "library_models", "single_precision"]

# Behind `libraries`, which completes a torchvision that torchmetrics would fail to import.
import torch
from catalogue import Model
from lightning.pytorch import LightningModule
from other_models import timm_models
from torch import Tensor, nn
from transformers_models import base_models, task_models


class LibraryTask(LightningModule):
    """Calls a model on its batch, unchanged.

    Args:
        net: The model.
        model: The entry of the catalogue.
        optimizer: "adamw" or "momentum".
    """

    def __init__(self, net: nn.Module, model: Model, optimizer: str) -> None:
        super().__init__()
        self.net = net
        self.constants = dict(model.constants)
        self.has_loss = model.loss != "outputs"
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = self.net(**batch, **self.constants)
        if self.has_loss:
            loss: Tensor = outputs.loss
            return loss
        tensors = list(_floats_in(outputs))
        return torch.stack([tensor.float().square().mean() for tensor in tensors]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "momentum":
            return torch.optim.SGD(self.parameters(), lr=0.001, momentum=0.9)
        return torch.optim.AdamW(self.parameters())


def _floats_in(outputs: Any) -> Iterator[Tensor]:
    """Yield the outputs with gradients."""
    if isinstance(outputs, Tensor):
        if outputs.requires_grad:
            yield outputs
        return
    values = outputs
    if hasattr(outputs, "values"):
        values = outputs.values()
    if isinstance(values, str | bytes) or not hasattr(values, "__iter__"):
        return
    for value in values:
        yield from _floats_in(value)


def library_models() -> Iterator[Model]:
    """Yield the models whose libraries are installed; the others are named on the error output."""
    libraries = {"transformers": [*base_models(), *task_models()], "timm": timm_models()}
    for library, models in libraries.items():
        reason = absence(library)
        if reason:
            print(f"skipped: {reason}", file=sys.stderr)
            continue
        yield from models


def single_precision(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch of the catalogue, which is in float64, in float32.

    Args:
        batch: The arguments of a model by name.
    """
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in batch.items()}
