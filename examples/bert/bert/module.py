"""The model and how it is trained."""

from functools import partial

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from bert.vocabulary import PAD

__all__ = ["BERT"]


class BERT(LightningModule):
    """A BERT that predicts masked words, and whether the second sentence follows the first.

    The loss is a mean over the masked words of a batch, which `loss_weight` says: a split of a batch into parts of
    unequal numbers of masked words changes nothing.

    Args:
        vocabulary: Number of words. Default: 30,000.
        hidden: Size of the vectors. Default: 256.
        layers: Number of layers. Default: 8.
        heads: Number of attention heads of a layer. Default: 8.
        length: Greatest number of places of a sample. Default: 512.
        dropout: Share of features left out in training. Default: 0.1.
        next_weight: Number of masked words that count as much as one answer to whether a sentence follows. With the
            number of masked words of a usual sample both losses weigh about the same. Default: 5.
        optimizer: "adamw", "adam" or "sgd". Default: "adamw".
        lr: The highest learning rate, reached after `warmup` steps. Default: 256^-0.5 * 10000^-0.5.
        warmup: Number of steps. Afterwards the rate falls with the square root of their number. Default: 10,000.
        weight_decay: Weight decay of the optimiser. Default: 0.01.
    """

    def __init__(
        self,
        *,
        vocabulary: int = 30000,
        hidden: int = 256,
        layers: int = 8,
        heads: int = 8,
        length: int = 512,
        dropout: float = 0.1,
        next_weight: float = 5.0,
        optimizer: str = "adamw",
        lr: float = 6.25e-4,
        warmup: int = 10000,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.words = nn.Embedding(vocabulary, hidden, padding_idx=PAD)
        self.segments = nn.Embedding(3, hidden, padding_idx=PAD)
        self.register_buffer("places", waves(length, hidden), persistent=False)
        self.dropout = nn.Dropout(dropout)
        layer = partial(nn.TransformerEncoderLayer, hidden, heads, 4 * hidden, dropout, batch_first=True)
        gelu = nn.GELU(approximate="tanh")
        self.blocks = nn.ModuleList(layer(activation=gelu, norm_first=True) for _ in range(layers))
        self.word_head = nn.Linear(hidden, vocabulary)
        self.next_head = nn.Linear(hidden, 2)

    def forward(self, words: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores (batch, length, vocabulary) of words and (batch, 2) of whether the second sentence follows."""
        features = self.words(words) + self.segments(segments) + self.places[: words.shape[1]]
        features = self.dropout(features)
        is_padding = words == PAD
        for block in self.blocks:
            features = block(features, src_key_padding_mask=is_padding)
        return self.word_head(features), self.next_head(features[:, 0])

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> dict[str, Tensor]:
        """Return the loss of a batch (words, segments, targets, is_next), and its weight: the masked words."""
        words_loss, next_loss, masked, _ = self._losses(batch)
        loss = (words_loss + self.hparams.next_weight * next_loss) / masked
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_words_loss", words_loss / masked)
        return {"loss": loss, "loss_weight": masked}

    def validation_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> None:
        """Log the mean losses of masked words and of next sentences, and the share of right answers to the latter."""
        words_loss, next_loss, masked, is_right = self._losses(batch)
        self.log("val_words_loss", words_loss / masked, prog_bar=True, batch_size=int(masked))
        pairs = len(is_right)
        self.log("val_next_loss", next_loss / pairs, batch_size=pairs)
        self.log("val_next_accuracy", is_right.float().mean(), batch_size=pairs)

    def predict_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> list[str]:
        """Return each sample as text, with `[word|guess]` in the place of a masked word."""
        words, segments, targets, _ = batch
        vocabulary = self.trainer.datamodule.vocabulary
        guesses = self(words, segments)[0][..., : len(vocabulary)].argmax(dim=2)
        return [vocabulary.show(*sample) for sample in zip(words, targets, guesses, strict=True)]

    def configure_optimizers(self) -> dict[str, object]:
        """Return the optimiser, and a rate that rises for `warmup` steps, then falls with the root of their number."""
        make = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}[self.hparams.optimizer]
        optimizer = make(self.parameters(), lr=self.hparams.lr, weight_decay=self.hparams.weight_decay)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._share_of_lr)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _losses(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        words, segments, targets, is_next = batch
        word_scores, next_scores = self(words, segments)
        # Two criteria: `PAD` is no target, but class 0 of the second one is "does not follow", which is learned, too.
        words_loss = F.cross_entropy(word_scores.flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum")
        next_loss = F.cross_entropy(next_scores, is_next, reduction="sum")
        return words_loss, next_loss, (targets != PAD).sum(), next_scores.argmax(dim=1) == is_next

    def _share_of_lr(self, step: int) -> float:
        progress = (step + 1) / self.hparams.warmup
        return min(progress, progress**-0.5)


def waves(length: int, hidden: int) -> Tensor:
    """Return sines and cosines of falling frequency that tell places apart, of shape (length, hidden)."""
    frequencies = 10000 ** (-torch.arange(0, hidden, 2) / hidden)
    angles = torch.arange(length).unsqueeze(1) * frequencies
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)
