"""The vocabulary: the most frequent words of a text, and the numbers that stand for them."""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["BEGIN", "END", "MASK", "PAD", "SPECIAL_WORDS", "UNKNOWN", "Vocabulary"]

SPECIAL_WORDS = ("<pad>", "<unk>", "<end>", "<begin>", "<mask>")
PAD, UNKNOWN, END, BEGIN, MASK = range(len(SPECIAL_WORDS))


class Vocabulary:
    """The most frequent words of a text; of equally frequent ones the first in the alphabet.

    Args:
        sentences: The text.
        size: Greatest number of words, special words included.

    Attributes:
        words: The words by number. The first are special ones, the others are ordered by frequency.
        counts: How often each word occurs in the text, of shape (words,). Special words have 0.

    Example:
        >>> Vocabulary([["a", "b", "a"]], size=6).words
        ['<pad>', '<unk>', '<end>', '<begin>', '<mask>', 'a']
    """

    def __init__(self, sentences: Iterable[list[str]], size: int) -> None:
        if size <= len(SPECIAL_WORDS):
            raise ValueError(f"vocabulary={size} has no room for words beside the {len(SPECIAL_WORDS)} special ones.")
        counts = Counter(word for sentence in sentences for word in sentence if word not in SPECIAL_WORDS)
        ordered = sorted(counts, key=lambda word: (-counts[word], word))
        self.words = [*SPECIAL_WORDS, *ordered[: size - len(SPECIAL_WORDS)]]
        self.counts = torch.tensor([counts[word] for word in self.words])
        # A special word in a text, such as WikiText's <unk>, is an unknown word.
        self._numbers = {word: number for number, word in enumerate(self.words) if number >= len(SPECIAL_WORDS)}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, sentence: list[str]) -> list[int]:
        """Return the numbers of words; those outside the vocabulary become `UNKNOWN`.

        Args:
            sentence: The words.
        """
        return [self._numbers.get(word, UNKNOWN) for word in sentence]

    def show(self, numbers: Tensor, targets: Tensor, guesses: Tensor) -> str:
        """Return a sample as text, with `[word|guess]` in the place of a masked word.

        Args:
            numbers: The words, of shape (length,).
            targets: The words to predict, of the same shape.
            guesses: The predicted words, of the same shape.
        """
        texts = []
        for number, target, guess in zip(numbers.tolist(), targets.tolist(), guesses.tolist(), strict=True):
            if target != PAD:
                texts.append(f"[{self.words[target]}|{self.words[guess]}]")
            elif number != PAD:
                texts.append(self.words[number])
        return " ".join(texts)
