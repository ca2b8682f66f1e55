"""Modules whose steps are predicted, and the recording of their real steps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional

from equipoise.extensions.planning.description.settings import StepSettings
from equipoise.extensions.planning.peaks.recorded_step import RecordedStep
from equipoise.extensions.planning.tracing.recording import record_step
from equipoise.extensions.planning.tracing.step import PlannedStep

__all__ = [
    "MODELS",
    "WIDTH",
    "Adapted",
    "Step",
    "Transformer",
    "example_of",
    "module_of",
    "module_with_adapters",
    "peak_of",
    "quantization",
    "recorded_really",
]

WIDTH = 256  # of the layers with adapters


class Step(LightningModule):
    """A network with the mean of its squared output for a loss.

    Args:
        net: The network.
        optimizer: "adam", "sgd" with momentum, or "rmsprop".
    """

    def __init__(self, net: nn.Module, optimizer: str = "adam") -> None:
        super().__init__()
        self.net = net
        self.optimizer = optimizer

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.net(batch).float().square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
        if self.optimizer == "rmsprop":
            return torch.optim.RMSprop(parameters)
        optimizer = torch.optim.AdamW(parameters)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=int(steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(30, 100), nn.ReLU(), nn.Dropout(), nn.Linear(100, 100), nn.Tanh(), nn.Linear(100, 5))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


class Transformer(nn.Module):
    """Two layers of an encoder, whose output has the weights of the embedding."""

    def __init__(self, width: int = 32, layers: int = 2, words: int = 200) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(words)))


class Pairs(nn.Module):
    """A loss over all pairs of samples, whose memory grows with the square of the batch; no step uses one part."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(30, 16)
        self.unused = nn.Linear(30, 16)

    def forward(self, values: Tensor) -> Tensor:
        features = functional.normalize(self.layer(values), dim=1)
        return torch.log_softmax(features @ features.T, 1)


class Adapted(nn.Module):
    """A frozen linear layer, and a product of two small matrices that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False)
        self.base.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        adapted: Tensor = self.base(features) + self.up(self.down(features))
        return adapted.tanh()


def module_with_adapters() -> Step:
    return Step(nn.Sequential(*[Adapted() for _ in range(6)]))


def quantization(kind: str) -> Any:
    pytest.importorskip({"int8": "torchao", "nf4": "bitsandbytes"}[kind])
    from equipoise import Quantization

    return Quantization(kind)  # type: ignore[arg-type]


def _images() -> Tensor:
    return torch.rand(4, 3, 16, 16)


def _values() -> Tensor:
    return torch.rand(4, 30)


def _words() -> Tensor:
    return torch.randint(0, 200, (4, 12))


# The networks, and a batch of each.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "perceptron": (perceptron, _values),
    "convolutions": (convolutions, _images),
    "transformer": (Transformer, _words),
    "adapted": (Adapted, lambda: torch.rand(4, WIDTH)),
    "pairs": (Pairs, _values),
}


def module_of(name: str, optimizer: str = "adam") -> Step:
    return Step(MODELS[name][0](), optimizer)


def example_of(name: str) -> Tensor:
    return MODELS[name][1]()


def recorded_really(module: nn.Module, example: Any, batch_size: int, settings: StepSettings) -> RecordedStep:
    """Run real steps of this size, and record the second one."""
    step = PlannedStep(module, settings)
    return record_step(step, example, batch_size, settings.accumulate_grad_batches)


def peak_of(recorded: RecordedStep) -> int:
    """The most bytes that were alive at a time."""
    running = most = 0
    for event in recorded.events:
        nbytes = recorded.holders[abs(event) - 1].nbytes
        running += nbytes if event > 0 else -nbytes
        most = max(most, running)
    return most
