"""Networks with random numbers, statistics of a batch, and sums in many orders; each maps 8 numbers to one."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["NETWORKS"]

WIDTH = 16


class Attention(nn.Module):
    """Two layers of attention over eight positions, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.2, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.outer = nn.Linear(WIDTH, 1)

    def forward(self, features: Tensor) -> Tensor:
        """Return the mean over the positions."""
        return self.outer(self.layers(self.inner(features[:, :, None])).mean(1))


class Recurrent(nn.Module):
    """Two recurrent layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(1, WIDTH, 2, batch_first=True, dropout=0.3)
        self.outer = nn.Linear(WIDTH, 1)

    def forward(self, features: Tensor) -> Tensor:
        """Return a number from the last state."""
        return self.outer(self.layers(features[:, :, None])[0][:, -1])


class Embedded(nn.Module):
    """Embeddings of rounded features.

    Args:
        sparse: Whether their gradients are sparse.
    """

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(20, WIDTH, sparse=sparse)
        self.outer = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))

    def forward(self, features: Tensor) -> Tensor:
        """Return a number from the sum of the embeddings."""
        return self.outer(self.table((features.float() * 5).long().abs() % 20).sum(1))


class Replacing(nn.Module):
    """Keeps an average of its inputs in a buffer that each step replaces, and does not use one layer in every part."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(8))
        self.layer = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        self.seldom = nn.Linear(8, 1)

    def forward(self, features: Tensor) -> Tensor:
        """Return a number from the distance to the average."""
        if self.training:
            self.average = 0.9 * self.average + 0.1 * features.detach().float().mean(0)
        outputs = self.layer(features - self.average)
        return outputs + self.seldom(features) if features[0, 0] > 0.5 else outputs


def perceptron() -> nn.Module:
    """Return layers with statistics of a batch and dropout."""
    first = [nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.4)]
    return nn.Sequential(*first, nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))


def convolutions() -> nn.Module:
    """Return convolutions in the layout of channels last, with statistics of a batch."""
    layers = [nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, WIDTH, 2, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU()]
    rest = [nn.Conv2d(WIDTH, 4, 2), nn.Dropout2d(0.2), nn.Flatten(), nn.Linear(16, 1)]
    return nn.Sequential(*layers, *rest).to(memory_format=torch.channels_last)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    # Reads the rows as the loader returns them.
    "rows": lambda: nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)),
    "perceptron": perceptron,
    "convolutions": convolutions,
    "attention": Attention,
    "recurrent": Recurrent,
    "embedding": lambda: Embedded(sparse=False),
    "sparse embedding": lambda: Embedded(sparse=True),
    "replaced buffer": Replacing,
}
