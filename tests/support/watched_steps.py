"""Steps that a `Ledger` of memory watches, and networks whose memory is known."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from equipoise.memory.profile.ledger import Ledger
from equipoise.memory.records import Composition

__all__ = ["Build", "convolution", "held_before", "mlp", "optimizer_of", "transformer", "watched_step"]

# Makes a network and a batch for it.
Build = Callable[[], tuple[nn.Module, Tensor]]


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(64, 500)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens)))


def mlp() -> tuple[nn.Module, Tensor]:
    layers = (nn.Linear(100, 300), nn.ReLU(), nn.Dropout(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 10))
    return nn.Sequential(*layers), torch.randn(64, 100)


def convolution() -> tuple[nn.Module, Tensor]:
    first = (nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2))
    last = (nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    return nn.Sequential(*first, *last), torch.randn(64, 3, 32, 32)


def transformer() -> tuple[nn.Module, Tensor]:
    return Transformer(), torch.randint(0, 500, (16, 32))


def optimizer_of(module: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "momentum":
        return torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def watched_step(ledger: Ledger, module: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    """A step as MemoryLogger tells of it."""
    ledger.start()
    ledger.add_batch(batch)
    loss = module(batch).pow(2).mean()
    ledger.begin("backward")
    loss.backward()
    ledger.begin("optimizer step")
    optimizer.step()
    ledger.stop()


def held_before(composition: Composition) -> int:
    """Return the tensors from before the step: parameters, buffers, the batch."""
    return sum(composition.totals().get(category, 0) for category in ("parameter", "buffer", "batch"))
