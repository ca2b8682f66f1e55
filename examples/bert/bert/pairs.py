"""Pairs of sentences with masked words, drawn anew for each epoch."""

import torch
from torch import Generator, Tensor
from torch.utils.data import TensorDataset

from bert.text import Document
from bert.vocabulary import BEGIN, END, MASK, PAD, SPECIAL_WORDS, Vocabulary

__all__ = ["SentencePairs", "mask_words"]


class SentencePairs:
    """All pairs of neighbouring sentences of a text.

    Args:
        documents: The text.
        vocabulary: Its vocabulary.
        length: Number of places of a sample: `<begin> A <end> B <end>`. Each sentence has half of the
            others; a longer one is cut into several.
    """

    def __init__(self, documents: list[Document], vocabulary: Vocabulary, length: int) -> None:
        self._vocabulary = vocabulary
        half = (length - 3) // 2
        pieces = []
        has_next = []
        for document in documents:
            in_document = [piece for sentence in document for piece in cut(vocabulary.encode(sentence), half)]
            pieces += in_document
            has_next += [True] * (len(in_document) - 1) + [False]
        self._sentences = torch.stack(pieces)
        # A first sentence of unknown words alone would make samples in which nothing can be masked.
        has_words = (self._sentences >= len(SPECIAL_WORDS)).any(dim=1)
        self._firsts = (torch.tensor(has_next) & has_words).nonzero().flatten()

    def __len__(self) -> int:
        return len(self._firsts)

    def draw(self, generator: Generator, *, masked: float = 0.8, random: float = 0.1) -> TensorDataset:
        """Return samples (words, segments, targets, is_next), the first three of shape (pairs, length).

        Half of the second sentences are those that follow. The others are the second sentences of any pair.

        Args:
            generator: Draws sentences and masks.
            masked: Share of the targets that become `<mask>`. Default: 0.8.
            random: Share of the targets that become any word. The rest stays as it is. Default: 0.1.
        """
        count = len(self)
        is_next = torch.rand(count, generator=generator) > 0.5
        any_pair = torch.randint(count, (count,), generator=generator)
        seconds = torch.where(is_next, self._firsts, self._firsts[any_pair]) + 1
        words, segments = join(self._sentences[self._firsts], self._sentences[seconds])
        words, targets = mask_words(words, generator, len(self._vocabulary), masked=masked, random=random)
        return TensorDataset(words, segments, targets, is_next.long())


def padded(numbers: list[int], length: int) -> Tensor:
    """Return numbers of words with padding behind them."""
    return torch.tensor(numbers + [PAD] * (length - len(numbers)))


def cut(numbers: list[int], most: int) -> list[Tensor]:
    """Return a sentence in padded pieces of so many words, each of which follows the one before."""
    starts = range(0, len(numbers), most)
    return [padded(numbers[start : start + most], most) for start in starts]


def join(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return `<begin> A <end> B <end>` and its segments: 1 for A, 2 for B, 0 for padding, which comes last.

    Args:
        first: Sentences (pairs, half), padded.
        second: As many others.
    """
    begin = torch.full((len(first), 1), BEGIN)
    end = torch.full((len(first), 1), END)
    words = torch.cat([begin, first, end, second, end], dim=1)
    segments = torch.ones_like(words)
    segments[:, 2 + first.shape[1] :] = 2
    segments[words == PAD] = 0
    # The padding of the first sentence moves behind the second.
    order = (words == PAD).long().argsort(dim=1, stable=True)
    return words.gather(1, order), segments.gather(1, order)


def mask_words(
    words: Tensor, generator: Generator, vocabulary: int, *, share: float = 0.15, masked: float, random: float
) -> tuple[Tensor, Tensor]:
    """Return words with masks, and targets: the number of a word to predict, `PAD` where there is none.

    Special words are never targets. At least one word of each sample is.

    Args:
        words: Samples (pairs, length).
        generator: Draws the masks.
        vocabulary: Number of words.
        share: Share of the words that are targets. Default: 0.15.
        masked: Share of the targets that become `<mask>`.
        random: Share of the targets that become any word. The rest stays as it is.
    """
    can_be_target = words >= len(SPECIAL_WORDS)
    lots = torch.rand(words.shape, generator=generator).masked_fill(~can_be_target, 2.0)
    is_target = can_be_target & ((lots < share) | (lots == lots.min(dim=1, keepdim=True).values))
    targets = torch.where(is_target, words, PAD)
    kinds = torch.rand(words.shape, generator=generator)
    any_words = torch.randint(len(SPECIAL_WORDS), vocabulary, words.shape, generator=generator)
    words = torch.where(is_target & (kinds < masked), MASK, words)
    is_random = is_target & (kinds >= masked) & (kinds < masked + random)
    return torch.where(is_random, any_words, words), targets
