"""Short trainings, on a GPU and on the CPU."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from equipoise import Strategy, Trainer
from tests.support.batches import CLASSES, FEATURES, TOKENS, Batches
from tests.support.quiet import QUIET

__all__ = ["CPU", "GPU", "QUIET", "Classifier", "Noisy", "fit", "loader", "samples", "weights"]

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
SIZES = [8, 8, 5, 8]

Run = tuple[Any, list[dict[str, Tensor | None]], Trainer]


class Gradients(Callback):
    """Keeps all gradients before every step, on the CPU: memory of the GPU is what some tests are about."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor | None]] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        gradients: dict[str, Tensor | None] = {}
        for name, parameter in pl_module.named_parameters():
            gradients[name] = None if parameter.grad is None else parameter.grad.to("cpu", copy=True)
        self.seen.append(gradients)


class Classifier(LightningModule):
    """A small network, which logs its loss.

    Args:
        optimizer: Makes the optimiser of its parameters. Default: AdamW.
    """

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer] | None = None) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(TOKENS * FEATURES, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, CLASSES)
        )

    def forward(self, features: Tensor) -> Tensor:
        return self.net(features)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self(batch["features"]), batch["label"])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer is None:
            return torch.optim.AdamW(self.parameters(), lr=0.01)
        return self.optimizer(self.parameters())


class Noisy(Classifier):
    """Draws random numbers, and keeps statistics of batches."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer] | None = None) -> None:
        super().__init__(optimizer)
        self.net = nn.Sequential(*self.net[:2], nn.BatchNorm1d(16), nn.Dropout(0.3), *self.net[2:])


def loader(sizes: Sequence[int] = SIZES, *, pinned: bool = False) -> DataLoader[Any]:
    """Batches that are ready."""
    return DataLoader(Batches(list(sizes)), batch_size=None, pin_memory=pinned)


def samples(count: int, batch_size: int) -> DataLoader[Any]:
    """Samples that a loader shuffles."""
    (batch,) = Batches([count])
    each = [{name: batch[name][index] for name in ("features", "label")} for index in range(count)]
    return DataLoader(each, batch_size, shuffle=True)  # type: ignore[arg-type]


def fit(
    make: Callable[[], LightningModule],
    device: torch.device = GPU,
    *,
    strategy: Strategy | str = "single_device",
    parts: int = 1,
    sizes: Sequence[int] = SIZES,
    pinned: bool = False,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> Run:
    """Train for two epochs, in float64 unless a precision is given.

    Args:
        make: Makes the module; its weights do not depend on the device.
        device: The only device.
        strategy: The strategy. Default: "single_device".
        parts: How often the strategy is given the device. Default: 1.
        sizes: Samples of each batch.
        pinned: The loader pins its batches. Default: False.
        callbacks: Callbacks of the trainer.
        options: Further arguments of the trainer.

    Returns:
        The module, its gradients before each step, and the trainer.
    """
    torch.manual_seed(7)
    module = make()
    gradients = Gradients()
    trainer = Trainer(
        strategy=strategy,
        devices=[device] * parts,
        callbacks=[gradients, *callbacks],
        **{**QUIET, "precision": "64-true", "max_epochs": 2, **options},
    )
    trainer.fit(module, loader(sizes, pinned=pinned))
    return module, gradients.seen, trainer


def weights(module: nn.Module) -> list[Tensor]:
    """Copies of all parameters, on the CPU."""
    return [parameter.detach().cpu().clone() for parameter in module.parameters()]
