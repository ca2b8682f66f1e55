"""Sequences of tokens, and a network that learns a token from another."""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

__all__ = ["WORDS", "mean_loss", "model", "padded", "tokens"]

WORDS = 50


def tokens(lengths: list[int], seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(1, WORDS, (length,), generator=draw) for length in lengths]


def padded(samples: list[Tensor]) -> Tensor:
    return pad_sequence(samples, batch_first=True)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, 4, padding_idx=0), nn.Linear(4, WORDS)).double()


def mean_loss(net: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over tokens of a loss, and their number."""
    losses = nn.functional.cross_entropy(net(batch).mT, (batch * 7) % WORDS, ignore_index=0, reduction="sum")
    count = (batch != 0).sum()
    return losses / count, count
