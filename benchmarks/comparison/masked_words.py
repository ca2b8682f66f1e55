"""A small encoder of words with a head for masked words, in the shape of BERT, and data for it.

The head returns a score for each word of the vocabulary at each place of each sample. So its outputs are larger than
all weights, as those of language models are.
"""

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

__all__ = ["MaskedWords", "Words"]


class MaskedWords(LightningModule):
    """Predicts masked words.

    Args:
        vocabulary: Number of words. Default: 4000.
        length: Number of words of a sample. Default: 32.
        width: Size of the vectors. Default: 32.
        layers: Number of encoder layers. Default: 2.
        dropout: Share of features left out in training. Default: 0, so that strategies compute the same numbers.
    """

    def __init__(
        self, *, vocabulary: int = 4000, length: int = 32, width: int = 32, layers: int = 2, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, words: Tensor) -> Tensor:
        """Return scores (batch, length, vocabulary) of words (batch, length)."""
        return self.head(self.encoder(self.words(words) + self.places))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the cross-entropy at all places."""
        words, targets = batch
        loss = cross_entropy(self(words).flatten(0, 1), targets.flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Words(LightningDataModule):
    """Random words, of which some are masked.

    Args:
        batch_size: Samples of a batch. Default: 16.
        samples: Number of samples. Default: 512.
        vocabulary: Number of words, of which word 0 is the mask. Default: 4000.
        length: Number of words of a sample. Default: 32.
    """

    def __init__(self, *, batch_size: int = 16, samples: int = 512, vocabulary: int = 4000, length: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size
        generator = torch.Generator().manual_seed(0)
        targets = torch.randint(1, vocabulary, (samples, length), generator=generator)
        is_masked = torch.rand(samples, length, generator=generator) < 0.15
        self.rows = TensorDataset(targets.masked_fill(is_masked, 0), targets)

    def train_dataloader(self) -> DataLoader:
        """Return shuffled batches."""
        return DataLoader(self.rows, batch_size=self.batch_size, shuffle=True)
