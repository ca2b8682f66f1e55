"""The data: pairs of sentences of a text, whose words are masked anew in each epoch."""

from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from bert.pairs import SentencePairs
from bert.text import Document, read_documentation, read_file
from bert.vocabulary import Vocabulary

__all__ = ["TextDataModule"]


class TextDataModule(LightningDataModule):
    """Pairs of sentences of a text; nothing is downloaded.

    The masks of an epoch depend on its number and `seed` alone, so all processes have the same. With
    `Trainer(reload_dataloaders_every_n_epochs=1)` each epoch has others.

    Args:
        root: A folder with texts in which words stand between spaces, such as WikiText-2. Default: None, the docstrings
            of Python's standard library, of which each tenth module is for validation.
        train_file: The file in `root` to train on. Default: "wiki.train.tokens".
        val_file: The file in `root` to validate on. Default: "wiki.valid.tokens".
        vocabulary: Greatest number of words, special words included. Default: 30,000.
        length: Number of places of a sample. Default: 163.
        batch_size: Samples of a batch. Default: 64.
        seed: Seed of the masks and of the sentences that are no neighbours. Default: 0.
    """

    def __init__(
        self,
        *,
        root: str | Path | None = None,
        train_file: str = "wiki.train.tokens",
        val_file: str = "wiki.valid.tokens",
        vocabulary: int = 30000,
        length: int = 163,
        batch_size: int = 64,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.root = root
        self.train_file = train_file
        self.val_file = val_file
        self.vocabulary_size = vocabulary
        self.length = length
        self.batch_size = batch_size
        self.seed = seed

    def setup(self, stage: str) -> None:
        """Read the text and build the vocabulary of its training part."""
        train_text, val_text = self._read()
        self.vocabulary = Vocabulary((words for document in train_text for words in document), self.vocabulary_size)
        self.train = SentencePairs(train_text, self.vocabulary, self.length)
        val = SentencePairs(val_text, self.vocabulary, self.length)
        # The same in each validation, and all masked: a word that stays visible would be no prediction.
        self.val = val.draw(torch.Generator().manual_seed(self.seed), masked=1.0, random=0.0)

    def train_dataloader(self) -> DataLoader:
        """Return shuffled batches of pairs drawn for this epoch."""
        epoch = self.trainer.current_epoch if self.trainer else 0
        generator = torch.Generator().manual_seed(self.seed + 1 + epoch)
        return DataLoader(self.train.draw(generator), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """Return batches of the validation text."""
        return DataLoader(self.val, batch_size=self.batch_size)

    def predict_dataloader(self) -> DataLoader:
        """Return the validation text once more, to look at what the model makes of it."""
        return self.val_dataloader()

    def unigram_loss(self) -> float:
        """Return the masked-word loss on the validation text of a model that knows only how frequent each word is."""
        log_shares = (self.vocabulary.counts / self.vocabulary.counts.sum()).log()
        targets = self.val.tensors[2]
        return -log_shares[targets[targets > 0]].mean().item()

    def _read(self) -> tuple[list[Document], list[Document]]:
        if self.root is not None:
            return read_file(Path(self.root) / self.train_file), read_file(Path(self.root) / self.val_file)
        modules = list(read_documentation().values())
        val_text = [document for module in modules[::10] for document in module]
        del modules[::10]
        return [document for module in modules for document in module], val_text
