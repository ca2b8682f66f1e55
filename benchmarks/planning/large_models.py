"""Language models that are too large for this host, and their data: what `equipoise plan` traces without memory."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from networks import GatedBlock, Language, Trained
from torch import Tensor, nn
from torch.utils.data import DataLoader

__all__ = ["LARGE", "LargeModel", "Tokens"]

WORDS = 32000


class LogitsOf(nn.Module):
    """A model of transformers, which returns its scores alone.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return scores


def _gpt2_xl() -> nn.Module:
    return Language(48, 1600, 25, 50257, 1024)


def _seven_billion() -> nn.Module:
    blocks = (GatedBlock(4096, 32, 11008) for _ in range(32))
    return nn.Sequential(nn.Embedding(WORDS, 4096), *blocks, nn.RMSNorm(4096), nn.Linear(4096, WORDS, bias=False))


def _llama_of_transformers() -> nn.Module:
    # The usual configuration is that of 7 billion parameters.
    from transformers import LlamaConfig, LlamaForCausalLM

    return LogitsOf(LlamaForCausalLM(LlamaConfig()))


LARGE: dict[str, Callable[[], nn.Module]] = {
    "gpt2-xl": _gpt2_xl,
    "7-billion": _seven_billion,
    "llama-7b of transformers": _llama_of_transformers,
}


class LargeModel(Trained):
    """A large model, which is built when its memory is needed.

    Args:
        name: One of `LARGE`.
    """

    def __init__(self, name: str) -> None:
        super().__init__(None, build=LARGE[name])


class Tokens(LightningDataModule):
    """Texts of zeros.

    Args:
        batch_size: Texts of a batch.
        length: Tokens of a text.
    """

    def __init__(self, batch_size: int, length: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.length = length

    def train_dataloader(self) -> Any:
        return DataLoader(torch.zeros(self.batch_size, self.length, dtype=torch.int64), self.batch_size)
