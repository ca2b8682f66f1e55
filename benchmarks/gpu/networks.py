"""Networks that are trained, their batches, their LightningModule, and the loops that people write by hand."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpu.measuring import Setting

__all__ = [
    "QUIET",
    "Task",
    "Training",
    "adam",
    "by_hand",
    "convolution",
    "difference",
    "fused_adam",
    "loss_of",
    "mlp",
    "sgd",
    "transformer",
]

Batch = tuple[Tensor, Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 1,
}


@dataclass(frozen=True)
class Task:
    """A network and its batches.

    Attributes:
        name: Its name.
        make: Makes the network, the same each time.
        batch: Makes a batch, the same for the same number, on the CPU.
        precision: The precision in which it is usually trained.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    precision: str = "32-true"

    def batches(self, count: int, device: torch.device) -> list[Batch]:
        """Several batches, on a device."""
        made = [self.batch(index) for index in range(count)]
        return [(features.to(device), labels.to(device)) for features, labels in made]


def mlp(setting: Setting) -> Task:
    """Return four layers of 256, so small that a GPU waits for the host."""
    width = 256
    samples = setting.pick(64, 8)

    def make() -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(3)]
        return nn.Sequential(*layers, nn.Linear(width, width))

    def batch(number: int) -> Batch:
        draw = torch.Generator().manual_seed(number)
        features = torch.randn(samples, width, generator=draw)
        return features, torch.randint(width, (samples,), generator=draw)

    return Task("MLP", make, batch)


class Encoder(nn.Module):
    """A transformer that names a class for each token."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens)))


def transformer(setting: Setting) -> Task:
    """Return 12 layers of width 768, whose products keep a GPU busy."""
    layers, width, heads = setting.pick((12, 768, 12), (2, 16, 2))
    vocabulary = setting.pick(8192, 32)
    samples, tokens = setting.pick((8, 512), (2, 8))

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Encoder(layers, width, heads, vocabulary)

    def batch(number: int) -> Batch:
        draw = torch.Generator().manual_seed(number)
        sequence = torch.randint(vocabulary, (samples, tokens + 1), generator=draw)
        return sequence[:, :-1].contiguous(), sequence[:, 1:].contiguous()

    return Task("transformer", make, batch, "bf16-mixed")


def convolution(setting: Setting) -> Task:
    """Return six convolutions with batch statistics."""
    channels = setting.pick(64, 4)
    samples, pixels = setting.pick((64, 64), (4, 8))

    def make() -> nn.Module:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for index in range(6):
            inputs = 3 if index == 0 else channels
            layers += [nn.Conv2d(inputs, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))

    def batch(number: int) -> Batch:
        draw = torch.Generator().manual_seed(number)
        images = torch.randn(samples, 3, pixels, pixels, generator=draw)
        return images, torch.randint(10, (samples,), generator=draw)

    return Task("convolution", make, batch)


def loss_of(network: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross entropy."""
    features, labels = batch
    logits = network(features)
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


# Optimisers


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return Adam as torch makes it by default."""
    return torch.optim.Adam(parameters, lr=1e-4)


def fused_adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return Adam with one kernel for all parameters."""
    return torch.optim.Adam(parameters, lr=1e-4, fused=True)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return plain gradient descent, which makes no difference larger."""
    return torch.optim.SGD(parameters, lr=0.5)


# Training


def difference(expected: nn.Module, actual: nn.Module) -> float:
    """Return the largest difference of parameters, by the size of the tensor."""
    largest = 0.0
    for one, other in zip(expected.parameters(), actual.parameters(), strict=True):
        one, other = one.detach().cpu(), other.detach().cpu()
        largest = max(largest, float((one - other).abs().max() / one.abs().max().clamp(min=1e-3)))
    return largest


class Training(L.LightningModule):
    """The LightningModule of a task.

    Args:
        task: What is trained.
        optimizer: Makes the optimiser. Default: Adam.
        logged: Whether two values are logged in each step. Default: False.
    """

    def __init__(self, task: Task, optimizer: MakeOptimizer = adam, *, logged: bool = False) -> None:
        super().__init__()
        self.network = task.make()
        self.optimizer = optimizer
        self.logged = logged

    def forward(self, features: Tensor) -> Tensor:
        return self.network(features)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = loss_of(self.network, batch)
        if self.logged:
            self.log("loss", loss, on_step=True, prog_bar=True)
            self.log("again", loss, on_step=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", loss_of(self.network, batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters())


def by_hand(
    task: Task,
    loader: Iterable[Batch],
    device: torch.device,
    *,
    optimizer: MakeOptimizer = adam,
    precision: str = "32-true",
    parts: int = 1,
) -> nn.Module:
    """Train as people write it by hand.

    Args:
        task: What is trained.
        loader: Its batches.
        device: Where.
        optimizer: Makes the optimiser. Default: Adam.
        precision: "32-true", "bf16-true", "bf16-mixed" or "16-mixed". Default: "32-true".
        parts: Parts into which each batch is split, one after another. Default: 1.
    """
    dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)
    network = task.make().to(device)
    if precision == "bf16-true":
        network.bfloat16()
    made = optimizer(network.parameters())
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "16-mixed")
    for batch in loader:
        features, labels = (tensor.to(device, non_blocking=True) for tensor in batch)
        if precision == "bf16-true" and features.is_floating_point():
            features = features.bfloat16()
        made.zero_grad()
        for part in zip(features.chunk(parts), labels.chunk(parts), strict=True):
            with nullcontext() if dtype is None else torch.autocast(device.type, dtype):
                loss = loss_of(network, part)
            scaler.scale(loss / parts if parts > 1 else loss).backward()
        scaler.step(made)
        scaler.update()
    return network
