"""Modules that are cut into stages, and how they are trained, for the tests of the pipeline."""

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from equipoise import PipelineStrategy, Trainer
from equipoise.precision import Precision
from equipoise.tree import tensors_in
from tests.support.batches import CLASSES, FEATURES, TOKENS, VOCABULARY, Batches
from tests.support.networks.transparency import Base
from tests.support.one_device import Gradients, Run
from tests.support.quiet import QUIET

__all__ = ["Checked", "Copying", "Network", "Tokens", "fit", "pipelined", "quiet", "stay_whole"]


def stay_whole(value: Any) -> None:
    """Ask for a value of what a module receives. What else it does, such as counting its calls, is then not lost."""
    for tensor in tensors_in(value):
        float(tensor.detach().sum())


def quiet(**options: Any) -> Trainer:
    """A trainer that writes nothing."""
    return Trainer(**{"accelerator": "cpu", **QUIET, "max_epochs": 1, "precision": "64-true", **options})


class Copying(PipelineStrategy):
    """Stages have copies of tied layers as if all devices were different ones."""

    def setup(self, module: nn.Module, precision: Precision) -> None:
        super().setup(module, precision)
        self._run.network.placement._are_apart = lambda stage, other: True


class Checked(PipelineStrategy):
    """Tells which calls were computed in stages, by counting the actions."""


class Network(nn.Module):
    """Tied weights, a skip connection, tuples and dictionaries between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.norm = nn.LayerNorm(6)
        self.output = nn.Linear(6, VOCABULARY, bias=False)
        self.output.weight = self.embedding.weight
        self.relu = nn.ReLU(inplace=True)

    def forward(self, tokens: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> dict[str, Any]:
        hidden = self.embedding(tokens)
        skipped = hidden
        for block in self.blocks:
            made = {"both": (block(hidden), scale), "size": tokens.size(1)}
            hidden = hidden + torch.tanh(made["both"][0]) * made["both"][1] / made["size"]
        if mask is not None:
            hidden = hidden * mask.unsqueeze(-1)
        return {"logits": self.output(self.relu(self.norm(hidden)) + skipped), "hidden": hidden}


class Tokens(Base):
    """Predicts tokens; the mean over those that are not masked.

    Args:
        by_self: Whether `training_step` calls the module rather than its child.
    """

    def __init__(self, by_self: bool = False) -> None:
        super().__init__()
        self.net, self.by_self = Network(), by_self
        self.register_buffer("smoothing", torch.tensor(0.1))

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Any:
        return self.net(tokens, mask=mask, scale=0.5)["logits"]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, mask = batch["tokens"][:, :-1], batch["mask"][:, 1:]
        logits = self(tokens, mask[:, :]) if self.by_self else self.net(tokens, mask, scale=0.5)["logits"]
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten(), reduction="none")
        loss = (losses * mask.flatten()).sum() / mask.sum().clamp(min=1)
        self.log("loss", loss, on_step=True, on_epoch=True)
        right = (logits.argmax(-1) == batch["tokens"][:, 1:]) * mask
        self.log("right", right.sum() / mask.sum().clamp(min=1), on_epoch=True)
        self.log("most", losses.max(), reduce_fx="max", on_epoch=True)
        return {"loss": loss, "loss_weight": mask.sum()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch["tokens"])
        self.log("val_loss", nn.functional.cross_entropy(logits.flatten(0, 1), batch["tokens"].flatten()))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch["tokens"])


def pipelined(stages: int, strategy: type[PipelineStrategy] = PipelineStrategy, **options: Any) -> dict[str, Any]:
    """Arguments of a trainer."""
    return {"strategy": strategy(**options), "devices": ["cpu"] * stages}


def fit(
    make: Callable[[], Any], sizes: list[int], *, seed: int = 0, val: list[int] | None = None, **options: Any
) -> Run:
    """Train on ready batches."""
    L.seed_everything(7, verbose=False)
    torch.set_default_dtype(torch.float64 if "precision" not in options else torch.float32)
    try:
        module = make()
    finally:
        torch.set_default_dtype(torch.float32)
    gradients = Gradients()
    trainer = quiet(**{"callbacks": [gradients], "strategy": "single_device", "devices": 1, "max_epochs": 2, **options})
    loaders = [DataLoader(Batches(sizes, seed), batch_size=None)]
    if val is not None:
        loaders.append(DataLoader(Batches(val, seed + 1), batch_size=None))
    trainer.fit(module, *loaders)
    return Run(module, gradients.seen, trainer)


assert (CLASSES, FEATURES, TOKENS) == (4, 6, 5)
