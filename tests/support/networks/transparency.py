"""Networks over one kind of batch (`tests.support.batches`), one for each way in which a split may go wrong.

Each trains on `features` of shape (batch, TOKENS, FEATURES) with one `label` a sample, or on `tokens` with a `mask`.
"""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from tests.support.batches import CLASSES, FEATURES, TOKENS, VOCABULARY

__all__ = [
    "Base",
    "Convolution",
    "Frozen",
    "Manual",
    "Masked",
    "MaskedOnTheHost",
    "Mlp",
    "Recurrent",
    "Tied",
]


class Base(L.LightningModule):
    """Trains on features of shape (batch, TOKENS, FEATURES) and one class for each sample."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self(batch["features"]), batch["label"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


class Mlp(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(TOKENS * FEATURES, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, CLASSES)
        )

    def forward(self, features: Tensor) -> Tensor:
        return self.net(features)


class Convolution(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1, bias=False),
            nn.GroupNorm(3, 3),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Linear(12, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        return self.head(self.net(features.unsqueeze(1)))


class Recurrent(Base):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        return self.head(self.lstm(features)[0].mean(1))


class Tied(Base):
    """Predicts every token from the one before, with the embedding as output weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.mix = nn.Linear(6, 6)
        self.output = nn.Linear(6, VOCABULARY, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(torch.tanh(self.mix(self.embedding(tokens))))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch["tokens"][:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())


class Frozen(Base):
    """A layer that is frozen, one that is never used, and one that only some batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused = nn.Linear(FEATURES, 6), nn.Linear(3, 3)
        self.sometimes, self.head = nn.Linear(6, 6), nn.Linear(6, CLASSES)
        self.first.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = torch.tanh(self.first(batch["features"].mean(1)))
        if batch_idx % 2:
            hidden = hidden + self.sometimes(hidden)
        return nn.functional.cross_entropy(self.head(hidden), batch["label"])


class Masked(Tied):
    """The mean over tokens that are not masked, whose number is the weight."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits, mask = self(batch["tokens"][:, :-1]), batch["mask"][:, 1:]
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten(), reduction="none")
        weight = mask.sum()
        return {"loss": (losses * mask.flatten()).sum() / weight.clamp(min=1), "loss_weight": self.weight(weight)}

    def weight(self, weight: Tensor) -> Any:
        return weight


class MaskedOnTheHost(Masked):
    """The same with a weight that is a number, so that a part known to be empty is left out."""

    def weight(self, weight: Tensor) -> Any:
        return int(weight)


class Manual(Recurrent):
    """Two optimisers, stepped by hand, the second every other batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        one, other = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        one.zero_grad()
        self.manual_backward(loss)
        one.step()
        if batch_idx % 2:
            other.step()
            other.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.lstm.parameters(), lr=0.1), torch.optim.Adam(self.head.parameters(), lr=0.01)
