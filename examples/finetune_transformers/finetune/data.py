"""The data: labelled docstrings as numbers of words, in batches that are dictionaries."""

import torch
from lightning.pytorch import LightningDataModule
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch.utils.data import DataLoader, random_split
from transformers import AutoTokenizer, DataCollatorWithPadding, PreTrainedTokenizerFast

from finetune.docstrings import labelled_docstrings

__all__ = ["DocstringDataModule"]

_SPECIAL_WORDS = ["[PAD]", "[UNK]", "[CLS]"]


class DocstringDataModule(LightningDataModule):
    """Docstrings of network modules and of development tools, in batches {input_ids, attention_mask, labels}.

    The tokenizer is trained on the training texts, so nothing is downloaded. With a model of yours from a folder, give
    the folder, whose tokenizer is used.

    Args:
        pretrained: A folder with a saved tokenizer. Default: None, a tokenizer of whole words is made.
        vocabulary: Greatest number of words of a tokenizer that is made. Default: 2000.
        length: Greatest number of words of a text. Default: 64.
        batch_size: Texts of a batch. Default: 32.
        max_tokens: Words of a training batch, padding included, in place of `batch_size`. Default: None.
        val_share: Share of the texts to validate on. Default: 0.2.
        split_seed: Seed of the split, which does not depend on the run's. Default: 0.
    """

    def __init__(
        self,
        *,
        pretrained: str | None = None,
        vocabulary: int = 2000,
        length: int = 64,
        batch_size: int = 32,
        max_tokens: int | None = None,
        val_share: float = 0.2,
        split_seed: int = 0,
    ) -> None:
        super().__init__()
        self.pretrained = pretrained
        self.vocabulary_size = vocabulary
        self.length = length
        self.batch_size = batch_size
        self.max_tokens = max_tokens
        self.val_share = val_share
        self.split_seed = split_seed

    def setup(self, stage: str) -> None:
        """Read the texts, split them, and turn words into numbers."""
        generator = torch.Generator().manual_seed(self.split_seed)
        texts = labelled_docstrings()
        train, val = random_split(texts, [1 - self.val_share, self.val_share], generator=generator)
        if self.pretrained is None:
            self.tokenizer = word_tokenizer([text for text, _ in train], self.vocabulary_size)
        else:
            self.tokenizer = AutoTokenizer.from_pretrained(self.pretrained, local_files_only=True)
        self.train = [self._encode(*sample) for sample in train]
        self.val = [self._encode(*sample) for sample in val]

    def train_dataloader(self) -> DataLoader:
        """Return batches of the training texts, shuffled anew every epoch."""
        if self.max_tokens is None:
            return self._loader(self.train, shuffle=True)
        from equipoise import TokenBatchSampler

        lengths = [len(sample["input_ids"]) for sample in self.train]
        sampler = TokenBatchSampler(lengths, self.max_tokens)
        return DataLoader(self.train, batch_sampler=sampler, collate_fn=DataCollatorWithPadding(self.tokenizer))

    def val_dataloader(self) -> DataLoader:
        """Return batches of the validation texts."""
        return self._loader(self.val, shuffle=False)

    def _loader(self, samples: list[dict[str, object]], *, shuffle: bool) -> DataLoader:
        # Each batch is as long as its longest text.
        collate = DataCollatorWithPadding(self.tokenizer)
        return DataLoader(samples, batch_size=self.batch_size, shuffle=shuffle, collate_fn=collate)

    def _encode(self, text: str, label: int) -> dict[str, object]:
        encoding = self.tokenizer(text, truncation=True, max_length=self.length, return_token_type_ids=False)
        return {**encoding, "labels": label}


def word_tokenizer(texts: list[str], size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the most frequent words of texts.

    Args:
        texts: The texts.
        size: Greatest number of words, special words included.
    """
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(vocab_size=size, special_tokens=_SPECIAL_WORDS, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    # The classifier reads the first place.
    first = ("[CLS]", tokenizer.token_to_id("[CLS]"))
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[first])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
