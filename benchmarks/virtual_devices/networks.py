"""Networks with random numbers, statistics of a batch, and sums in many orders; each maps 8 numbers to one."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

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


class Directions(nn.Module):
    """A gated recurrent layer in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(2, WIDTH, batch_first=True, bidirectional=True)
        self.outer = nn.Linear(2 * WIDTH, 1)

    def forward(self, features: Tensor) -> Tensor:
        """Return a number from the states of four positions."""
        return self.outer(self.layer(features.unflatten(1, (4, 2)))[0].amax(1))


class Experts(nn.Module):
    """Sends each sample to two of four experts, and adds their outputs by index."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        experts = [nn.Sequential(nn.Linear(8, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1)) for _ in range(4)]
        self.experts = nn.ModuleList(experts)

    def forward(self, features: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of two experts."""
        weights, chosen = self.gate(features).float().softmax(1).topk(2)
        outputs = features.new_zeros(len(features), 1, dtype=torch.float32)
        for number, expert in enumerate(self.experts):
            rows, ranks = (chosen == number).nonzero(as_tuple=True)
            outputs = outputs.index_add(0, rows, expert(features[rows]).float() * weights[rows, ranks, None])
        return outputs


class Tied(nn.Module):
    """An embedding whose weights are those of the output layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1))
        self.outer = nn.Linear(WIDTH, 12, bias=False)
        self.outer.weight = self.table.weight

    def forward(self, features: Tensor) -> Tensor:
        """Return the logarithm of the sum over all entries."""
        entries = self.table((features.float() * 3).long().abs() % 12)
        return self.outer(self.inner(entries.mean(1))).float().logsumexp(1, keepdim=True)


class Checkpointed(nn.Module):
    """Computes layers with dropout again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.3), nn.RMSNorm(WIDTH))
        self.outer = nn.Linear(WIDTH, 1)

    def forward(self, features: Tensor) -> Tensor:
        """Return a number from two passes of a block."""
        outputs = self.first(features)
        for _ in range(2):
            outputs = checkpoint(self.block, outputs, use_reentrant=False)
        return self.outer(outputs)


def perceptron() -> nn.Module:
    """Return layers with statistics of a batch and dropout."""
    first = [nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.4)]
    return nn.Sequential(*first, nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))


def convolutions() -> nn.Module:
    """Return convolutions in the layout of channels last, with statistics of a batch."""
    layers = [nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, WIDTH, 2, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU()]
    rest = [nn.Conv2d(WIDTH, 4, 2), nn.Dropout2d(0.2), nn.Flatten(), nn.Linear(16, 1)]
    return nn.Sequential(*layers, *rest).to(memory_format=torch.channels_last)


def depthwise() -> nn.Module:
    """Return grouped and transposed convolutions, with statistics of groups."""
    layers = [nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 8, 3, padding=1, groups=2), nn.GroupNorm(4, 8), nn.Hardswish()]
    rest = [nn.ConvTranspose1d(8, 4, 2, stride=2), nn.AdaptiveAvgPool1d(3), nn.Flatten(), nn.Linear(12, 1)]
    return nn.Sequential(*layers, *rest)


def spectral() -> nn.Module:
    """Return layers whose weights are divided by their norms, which buffers estimate in each forward."""
    return nn.Sequential(spectral_norm(nn.Linear(8, WIDTH)), nn.ELU(), spectral_norm(nn.Linear(WIDTH, 1)))


def instances() -> nn.Module:
    """Return convolutions in space, with running statistics of each sample, and dropout of whole channels."""
    layers = [nn.Unflatten(1, (1, 2, 2, 2)), nn.Conv3d(1, 6, 2, padding=1), nn.LeakyReLU(inplace=True)]
    norm = nn.InstanceNorm3d(6, affine=True, track_running_stats=True)
    return nn.Sequential(*layers, norm, nn.Dropout3d(0.2), nn.MaxPool3d(2), nn.Flatten(), nn.Linear(6, 1))


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
    "two directions": Directions,
    "experts": Experts,
    "tied": Tied,
    "checkpointed": Checkpointed,
    "depthwise": depthwise,
    "spectral": spectral,
    "instances": instances,
}
