"""TokenBatchSampler: batches of as many samples as a budget of tokens holds."""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from equipoise.errors import ConfigurationError
from equipoise.extensions.tokens.grouping import group_by_longest, group_by_sum, join_rows
from equipoise.extensions.tokens.lengths import checked_lengths, rounded_up
from equipoise.parallel.batches.shares import even_sizes
from equipoise.validation import check_whole, is_number

__all__ = ["TokenBatchSampler"]

# Processes divide the last batches of an epoch. That as many find samples is guaranteed, if there are such batches.
_MOST_PROCESSES = 64


class TokenBatchSampler(Sampler[list[int]]):
    """A batch sampler whose batches are limited by their tokens instead of their number of samples.

    Samples of similar lengths meet in a batch, others in each epoch. Each sample is drawn once in an epoch. All epochs
    have as many batches, so `len` is certain. The order follows from `seed` and the epoch, which trainers set.

    Several processes take the batches in turn: a step of W processes has the samples of W batches of one process. If an
    epoch ends with fewer batches, these are cut, so that each process has one (`deal_step`).

    Args:
        lengths: Number of tokens of each sample, in the order of the data set. A sequence, a tensor or an array.
        max_tokens: The budget of a batch.
        padded: True: the budget limits the longest sample times the number of samples, for a collate function that
            pads. False: the sum of the lengths, for one that packs or keeps sequences as they are. Default: True.
        row_tokens: With `padded=False`, the `max_tokens` of a `PackedCollate`. The budget then limits its rows, padding
            included. Default: None, one row.
        shuffle: Draw another order in each epoch. False: the longest samples come first. Default: True.
        seed: Seed of the order. Default: 0.
        max_samples: Largest number of samples of a batch. Default: None, any.
        pad_to_multiple_of: The argument of this name of the collate function, which makes samples longer. Default: 1.
        spread: Samples whose lengths differ by this share at most count as equally long when the order is shuffled.
            With a larger one, samples meet more others, and batches have more padding. Default: 0.1.
        allow_longer: Give a sample that exceeds the budget a batch of its own. Default: False, it is an error.

    Raises:
        ConfigurationError: If an argument is out of range, or a sample exceeds the budget.

    Example:
        >>> sampler = TokenBatchSampler([3, 1, 2, 6, 2], max_tokens=6, shuffle=False)
        >>> list(sampler)
        [[3], [0, 2], [4, 1]]
        >>> from torch.utils.data import DataLoader
        >>> loader = DataLoader(range(5), batch_sampler=sampler)
    """

    def __init__(
        self,
        lengths: Sequence[int] | Tensor,
        max_tokens: int,
        *,
        padded: bool = True,
        row_tokens: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        max_samples: int | None = None,
        pad_to_multiple_of: int = 1,
        spread: float = 0.1,
        allow_longer: bool = False,
    ) -> None:
        check_whole("max_tokens", max_tokens, least=1)
        check_whole("row_tokens", row_tokens, least=1, optional=True)
        if row_tokens is not None:
            _check_rows(row_tokens, max_tokens, padded=padded, allow_longer=allow_longer)
        check_whole("seed", seed, least=0)
        check_whole("max_samples", max_samples, least=1, optional=True)
        check_whole("pad_to_multiple_of", pad_to_multiple_of, least=1)
        # Also no NaN.
        if not is_number(spread) or not 0 <= spread < math.inf:
            raise ConfigurationError(f"spread is a share from 0, such as 0.1, not {spread!r}.")
        self.max_tokens = max_tokens
        self.padded = padded
        self.row_tokens = row_tokens
        self.shuffle = shuffle
        self.seed = seed
        self.max_samples = max_samples
        self.epoch = 0
        self._lengths = checked_lengths(lengths, pad_to_multiple_of)
        self._longest = max_tokens
        if row_tokens is not None:
            self._longest = row_tokens
        if not allow_longer:
            self._refuse_longer()
        # A sample counts as long as the longest one that it may change places with.
        self._counted_lengths = self._lengths
        if shuffle and spread:
            self._counted_lengths = rounded_up(self._lengths, spread, self._longest)

    def _refuse_longer(self) -> None:
        longer = (self._lengths > self._longest).nonzero().flatten()
        if not len(longer):
            return
        index = int(longer[0])
        length = int(self._lengths[index])
        count = len(self._lengths)
        name = "max_tokens"
        remedy = "raise max_tokens, or give each of them a batch of its own by allow_longer=True"
        if self.row_tokens is not None:
            name = "row_tokens"
            remedy = "or raise row_tokens"
        raise ConfigurationError(
            f"Sample {index} has {length} tokens, more than {name}={self._longest}; so have {len(longer)} of {count}"
            f" samples. Truncate them, {remedy}."
        )

    @property
    def sampler(self) -> "TokenBatchSampler":
        """The sampler itself: trainers call `set_epoch` of a batch sampler's `sampler`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of this epoch from the next iteration on.

        Args:
            epoch: The number of the epoch, from 0.
        """
        self.epoch = epoch

    def check_dataset(self, dataset: Any) -> None:
        """Check that each sample has a length. The trainer calls this.

        Args:
            dataset: The data set of the loader.

        Raises:
            ConfigurationError: If the data set has another number of samples.
        """
        try:
            count = len(dataset)
        except (TypeError, NotImplementedError):
            return
        if count != len(self._lengths):
            raise ConfigurationError(
                f"TokenBatchSampler has the lengths of {len(self._lengths)} samples, but the data set of its loader has"
                f" {count}. To train on a part of them, pass a torch.utils.data.Subset and its lengths."
            )

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[list[int]]:
        # 1. Samples that count as equally long change places.
        groups = self._groups
        samples = torch.arange(len(self._lengths))
        numbers = torch.arange(len(groups))
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed + self.epoch)
            samples = torch.randperm(len(samples), generator=generator)
            numbers = torch.randperm(len(numbers), generator=generator)
        by_length = self._counted_lengths[samples].argsort(stable=True, descending=True)
        order: list[int] = samples[by_length].tolist()

        # 2. Batches change places.
        shuffled = [groups[number] for number in numbers.tolist()]
        _put_a_large_one_last(shuffled)
        return _batches(order, shuffled)

    @cached_property
    def _groups(self) -> list[list[int]]:
        """The batches, as positions in the order of the lengths; the same in all epochs."""
        counted: list[int] = self._counted_lengths.sort(descending=True).values.tolist()
        most = self.max_samples or math.inf
        if self.padded:
            return group_by_longest(counted, self.max_tokens, most)
        # Sums of lengths: in one row, or in rows that a batch has several of.
        if self.row_tokens is None:
            return group_by_sum(counted, self.max_tokens, most)
        rows = group_by_sum(counted, self.row_tokens, most)
        return join_rows(rows, self.max_tokens // self.row_tokens, most)

    def deal_step(self, batches: Sequence[list[int]], count: int) -> list[list[int]]:
        """Divide the samples of a step among processes. The trainer calls this.

        Args:
            batches: Batches of the step. Where there are fewer than processes, each part is within the budget. If there
                are more, as in a run that continues on fewer processes, batches of similar lengths are joined.
            count: The number of processes.

        Returns:
            The samples of each process. Some are empty if there are fewer samples than processes.
        """
        if len(batches) > count:
            return self._joined(batches, count)
        parts = list(batches)
        while len(parts) < count:
            parts.sort(key=len)
            largest = parts.pop()
            middle = (len(largest) + 1) // 2
            parts.append(largest[:middle])
            parts.append(largest[middle:])
        return parts

    def planned_batches(self) -> list[tuple[list[int], int | None]]:
        """Return batches for which the memory of a step is planned. `equipoise plan` calls this.

        Returns:
            The samples of a batch and the tokens of one of its rows; these are None where a batch is one row. Padded
            batches need the most memory at one of two ends: with the longest samples, or with the most.
        """
        order = self._counted_lengths.argsort(stable=True, descending=True)
        batches = list(_batches(order.tolist(), self._groups))
        if not self.padded:
            fullest = max(batches, key=self._tokens_of)
            return [(fullest, self.row_tokens)]
        with_longest = batches[0]
        with_most = max(batches, key=len)
        return [
            (with_longest, self._longest_of(with_longest)),
            (with_most, self._longest_of(with_most)),
        ]

    def _longest_of(self, batch: list[int]) -> int:
        return int(self._lengths[batch].max())

    def _tokens_of(self, batch: list[int]) -> int:
        return int(self._lengths[batch].sum())

    def _joined(self, batches: Sequence[list[int]], count: int) -> list[list[int]]:
        """Return the batches joined to fewer, neighbours by their longest samples."""
        waiting = iter(sorted(batches, key=self._longest_of))
        joined = []
        # As many batches for each process as for any other, or one more.
        for size in even_sizes(len(batches), count):
            joined.append(list(chain.from_iterable(islice(waiting, size))))
        return joined


def _batches(order: Sequence[int], groups: Sequence[list[int]]) -> Iterator[list[int]]:
    """Yield the samples of each group of positions in an order."""
    for group in groups:
        yield [order[position] for position in group]


def _put_a_large_one_last(groups: list[list[int]]) -> None:
    """Move the last large group to the end, so that each process finds a sample in the last step."""
    sizes = [len(group) for group in groups]
    fewest = min(_MOST_PROCESSES, max(sizes))
    last = len(groups) - 1
    while sizes[last] < fewest:
        last -= 1
    groups.append(groups.pop(last))


def _check_rows(
    row_tokens: int,
    max_tokens: int,
    *,
    padded: bool,
    allow_longer: bool,
) -> None:
    if padded or row_tokens > max_tokens:
        raise ConfigurationError(
            f"row_tokens={row_tokens} needs padded=False, and max_tokens from {row_tokens}: rows are of packed samples,"
            f" and a batch has at least one. Here padded={padded} and max_tokens={max_tokens}."
        )
    if allow_longer:
        raise ConfigurationError("allow_longer=True has no use with row_tokens: such a sample fits into no row.")
