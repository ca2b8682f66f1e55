"""Networks of the usual kinds, each with a batch."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["NETWORKS", "GatedBlock", "Language", "Trained"]


class Trained(LightningModule):
    """A network with the mean of its squared output for a loss.

    Args:
        net: The network; None if `build` builds it in `configure_model`.
        optimizer: "adamw", "momentum", "rmsprop", or "two" of the first two, stepped by hand.
        build: Returns the network.
    """

    def __init__(
        self, net: nn.Module | None, optimizer: str = "adamw", build: Callable[[], nn.Module] | None = None
    ) -> None:
        super().__init__()
        self.net = net
        self.optimizer = optimizer
        self.build = build
        self.automatic_optimization = optimizer != "two"

    def configure_model(self) -> None:
        if self.net is None and self.build is not None:
            self.net = self.build()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        assert self.net is not None
        loss = self.net(batch).float().square().mean()
        if self.automatic_optimization:
            return loss
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if self.optimizer == "momentum":
            return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
        if self.optimizer == "rmsprop":
            return torch.optim.RMSprop(parameters)
        if self.optimizer == "two":
            half = len(parameters) // 2
            return [torch.optim.AdamW(parameters[:half]), torch.optim.SGD(parameters[half:], lr=0.01, momentum=0.9)]
        return torch.optim.AdamW(parameters)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.inward = nn.Linear(width, 3 * width)
        self.outward = nn.Linear(width, width)

    def forward(self, values: Tensor) -> Tensor:
        batch, length, width = values.shape
        parts = self.inward(values).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts.unbind(0), is_causal=self.causal)
        return self.outward(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, *, causal: bool = True) -> None:
        super().__init__()
        self.attention = Attention(width, heads, causal=causal)
        self.first = nn.LayerNorm(width)
        self.second = nn.LayerNorm(width)
        self.dense = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, values: Tensor) -> Tensor:
        values = values + self.attention(self.first(values))
        return values + self.dense(self.second(values))


class Language(nn.Module):
    """A model like GPT-2, whose head has the weights of the embedding."""

    def __init__(self, layers: int, width: int, heads: int, words: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        values = self.embedding(words) + self.positions[: words.size(1)]
        return self.head(self.norm(self.blocks(values)))


class GatedBlock(nn.Module):
    """A block like Llama's: RMS norms, rotated positions left out, a gated dense part."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.first = nn.RMSNorm(width)
        self.second = nn.RMSNorm(width)
        self.attention = Attention(width, heads, causal=True)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        values = values + self.attention(self.first(values))
        normed = self.second(values)
        return values + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layers = kind(16, 48, 2, batch_first=True)
        self.head = nn.Linear(48, 4)

    def forward(self, values: Tensor) -> Tensor:
        return self.head(self.layers(values)[0][:, -1])


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, values: Tensor) -> Tensor:
        return functional.relu(values + self.inner(values))


class Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = _convolution(3, 16)
        self.second = _convolution(16, 32)
        self.deep = _convolution(32, 32)
        self.up = nn.ConvTranspose2d(32, 32, 2, 2)
        self.last = nn.ConvTranspose2d(64, 16, 2, 2)
        self.head = nn.Conv2d(32, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        first = self.first(images)
        second = self.second(functional.max_pool2d(first, 2))
        deep = self.up(self.deep(functional.max_pool2d(second, 2)))
        return self.head(torch.cat([first, self.last(torch.cat([second, deep], 1))], 1))


class Mixture(nn.Module):
    """Experts of which one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4))

    def forward(self, values: Tensor) -> Tensor:
        weights = self.gate(values).softmax(-1)
        outputs = [expert(values) * weights[:, index : index + 1] for index, expert in enumerate(self.experts[:3])]
        return torch.stack(outputs).sum(0)


class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.correction = nn.Sequential(nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False))

    def forward(self, values: Tensor) -> Tensor:
        return functional.gelu(self.frozen(values) + self.correction(values))


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 16)

    def forward(self, values: Tensor) -> Tensor:
        features = functional.normalize(self.layer(values), dim=1)
        return torch.log_softmax(features @ features.T, 1)


def _convolution(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


def _classifier(*layers: nn.Module, width: int) -> nn.Module:
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def _separable(inputs: int, outputs: int) -> nn.Sequential:
    depth = nn.Conv2d(inputs, inputs, 3, padding=1, groups=inputs)
    return nn.Sequential(depth, nn.BatchNorm2d(inputs), nn.Hardswish(), nn.Conv2d(inputs, outputs, 1), nn.ReLU6())


def _encoder(activation: str, *, norm_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, activation=activation, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(300, 64), encoder, nn.Linear(64, 300))


def _images() -> Tensor:
    return torch.rand(4, 3, 32, 32)


def _values() -> Tensor:
    return torch.rand(4, 64)


def _words() -> Tensor:
    return torch.randint(0, 300, (4, 24))


def _series() -> Tensor:
    return torch.rand(4, 20, 16)


# By name: the network and its batch.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "perceptron": (lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)), _values),
    "deep perceptron, dropout": (
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Dropout(), nn.Tanh()) for _ in range(8))),
        _values,
    ),
    "autoencoder": (lambda: nn.Sequential(nn.Linear(64, 8), nn.SiLU(), nn.Linear(8, 64)), _values),
    "normalised perceptron": (
        lambda: nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 4)),
        _values,
    ),
    "convolutions": (
        lambda: _classifier(_convolution(3, 16), nn.MaxPool2d(2), _convolution(16, 32), width=32),
        _images,
    ),
    "residual": (lambda: _classifier(_convolution(3, 16), Residual(_convolution(16, 16)), width=16), _images),
    "separable": (lambda: _classifier(_convolution(3, 16), _separable(16, 24), _separable(24, 32), width=32), _images),
    "group norm": (lambda: _classifier(nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.ELU(), width=16), _images),
    "unet": (Unet, _images),
    "one-dimensional": (
        lambda: nn.Sequential(nn.Conv1d(20, 32, 3), nn.ReLU(), nn.AvgPool1d(2), nn.Flatten(1)),
        _series,
    ),
    "lstm": (lambda: Recurrent(nn.LSTM), _series),
    "gru": (lambda: Recurrent(nn.GRU), _series),
    "encoder, relu": (lambda: _encoder("relu", norm_first=False), _words),
    "encoder, gelu": (lambda: _encoder("gelu", norm_first=True), _words),
    "language model, tied": (lambda: Language(2, 64, 4, 300, 24), _words),
    "gated blocks": (lambda: nn.Sequential(nn.Embedding(300, 64), GatedBlock(64, 4, 160), nn.Linear(64, 300)), _words),
    "bag of words": (lambda: nn.Sequential(nn.EmbeddingBag(300, 32), nn.Linear(32, 300)), _words),
    "frozen part": (
        lambda: nn.Sequential(nn.Linear(64, 128).requires_grad_(False), nn.ReLU(), nn.Linear(128, 10)),
        _values,
    ),
    "low rank": (LowRank, _values),
    "mixture, one expert unused": (Mixture, _values),
    "pairs of samples": (Pairs, _values),
}
