"""The data: blocks of consecutive tokens, in batches that a causal language model takes."""

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import AutoTokenizer

from finetune_lora.text import read_text

__all__ = ["Blocks", "TextDataModule"]


class Blocks(Dataset):
    """Blocks of consecutive tokens; the last tokens, which fill no block, are left out.

    Args:
        tokens: Numbers of the tokens of a text, shape `(tokens,)`.
        length: Number of tokens of a block.
    """

    def __init__(self, tokens: Tensor, length: int) -> None:
        count = len(tokens) // length
        self.blocks = tokens[: count * length].view(count, length)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        # The model itself shifts the labels by one place.
        return {"input_ids": self.blocks[index], "labels": self.blocks[index]}


class TextDataModule(LightningDataModule):
    """A text in batches {input_ids, labels}, each of shape `(batch_size, length)`.

    Args:
        text: "docstrings" or "sources" of the running Python, or the path of a file. Default: "docstrings".
        characters: Number of characters that are read at most. Default: 600,000.
        tokenizer: A folder with a saved tokenizer. Default: None, the tokens are the bytes of the text.
        length: Number of tokens of a block. Default: 128.
        batch_size: Blocks of a batch. Default: 16.
        val_share: Share of the text to validate on, at its end. Default: 0.1.
    """

    def __init__(
        self,
        *,
        text: str = "docstrings",
        characters: int = 600_000,
        tokenizer: str | None = None,
        length: int = 128,
        batch_size: int = 16,
        val_share: float = 0.1,
    ) -> None:
        super().__init__()
        self.text = text
        self.characters = characters
        self.tokenizer = tokenizer
        self.length = length
        self.batch_size = batch_size
        self.val_share = val_share

    def setup(self, stage: str) -> None:
        """Read the text and turn it into blocks of tokens."""
        text = read_text(self.text, self.characters)
        border = round(len(text) * (1 - self.val_share))
        self.train = Blocks(self._tokens(text[:border]), self.length)
        self.val = Blocks(self._tokens(text[border:]), self.length)

    def train_dataloader(self) -> DataLoader:
        """Return batches of the training text, shuffled anew every epoch."""
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """Return batches of the text to validate on."""
        return DataLoader(self.val, batch_size=self.batch_size)

    def _tokens(self, text: str) -> Tensor:
        if self.tokenizer is None:
            return torch.tensor(list(text.encode()))
        tokenizer = AutoTokenizer.from_pretrained(self.tokenizer, local_files_only=True)
        # Longer than the model's context: the blocks are not.
        return torch.tensor(tokenizer(text, verbose=False)["input_ids"])
