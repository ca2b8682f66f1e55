"""The networks that are cut."""

import torch
from torch import Tensor, nn

__all__ = ["Bottleneck", "PyramidNet", "Transformer"]


class Block(nn.Module):
    """A block of a transformer, normalised first.

    Args:
        width: The features of a token.
        heads: The heads of its attention.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.take, self.give = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.take(self.first(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind()
        found = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.give(found.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp(self.second(x))


class Transformer(nn.Module):
    """A language model whose vocabulary costs as much as several of its blocks.

    Args:
        blocks: Their number. Default: 24.
        width: The features of a token. Default: 384.
        vocabulary: The number of words. Default: 20,000.
    """

    def __init__(self, blocks: int = 24, width: int = 384, vocabulary: int = 20_000) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, max(1, width // 64)) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Bottleneck(nn.Module):
    """A block of a PyramidNet: normalised first, not activated last; what is missing of the shortcut is zero.

    Args:
        given: Channels that come in.
        channels: Channels of its middle; four times as many go out.
        stride: Of the middle.
    """

    def __init__(self, given: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(given),
            nn.Conv2d(given, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, 4 * channels, 1, bias=False),
            nn.BatchNorm2d(4 * channels),
        )
        self.shrink = nn.AvgPool2d(2) if stride == 2 else nn.Identity()
        self.missing = 4 * channels - given

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + nn.functional.pad(self.shrink(x), (0, 0, 0, 0, 0, self.missing))


class PyramidNet(nn.Module):
    """A residual network whose channels grow with every block (Han et al., 2017); (batch, 3, 32, 32) → (batch, 10).

    Args:
        blocks: In each of the three groups. Default: 18, which makes 164 layers.
        growth: By how many channels the last block is wider than the first. Default: 252, which makes 24 million
            parameters.
    """

    def __init__(self, blocks: int = 18, growth: int = 252) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16))
        layers, given, width = [], 16, 16.0
        for group in range(3):
            for index in range(blocks):
                width += growth / (3 * blocks)
                layers.append(Bottleneck(given, round(width), 2 if group and not index else 1))
                given = 4 * round(width)
        self.layers = nn.Sequential(*layers)
        self.last = nn.Sequential(nn.BatchNorm2d(given), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(given, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.layers(self.stem(x))))


def count(module: nn.Module) -> int:
    """The number of parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


if __name__ == "__main__":
    torch.set_num_threads(1)
    for network in (Transformer(), PyramidNet()):
        print(type(network).__name__, f"{count(network):,}")
