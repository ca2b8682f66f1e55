"""Batches for which a step is planned: the first of a loader, or those that its batch sampler names."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from equipoise.errors import ConfigurationError
from equipoise.extensions.planning.tracing.batches import size_of_batch

__all__ = ["PlannedBatches", "empty_loader", "planned_batches"]


@dataclass(frozen=True)
class PlannedBatches:
    """Batches for which a step is planned. The largest ones of each shape, if shapes differ.

    Attributes:
        batches: The batches, at least one.
        row_tokens: Tokens of a row of each batch; empty if the loader has no budget of tokens.
    """

    batches: Sequence[Any]
    row_tokens: Sequence[int] = ()

    @property
    def budget(self) -> int | None:
        """Tokens of the largest of them; None without a budget of tokens."""
        if not self.row_tokens:
            return None
        sizes = map(size_of_batch, self.batches)
        return max(size * tokens for size, tokens in zip(sizes, self.row_tokens, strict=True))

    def largest_budget(self, rows: Sequence[int]) -> int:
        """Return the largest budget of tokens with which no batch has more rows than fit; 0 if it holds no longest row.

        Args:
            rows: The number of rows that fit, of each batch.
        """
        budget = min(count * tokens for count, tokens in zip(rows, self.row_tokens, strict=True))
        return budget if budget >= max(self.row_tokens) else 0


def planned_batches(loader: Any) -> PlannedBatches:
    """Return the batches of a loader for which a step is planned.

    A batch sampler whose batches have different shapes may have a method `planned_batches`, without arguments. It
    returns a pair for each shape to plan: the samples of its largest batch, and the tokens of a row in it, or None if
    rows have no fixed number.

    Args:
        loader: Any iterable of batches.

    Raises:
        ConfigurationError: If it has no batch.
    """
    name_batches = getattr(getattr(loader, "batch_sampler", None), "planned_batches", None)
    if name_batches is None:
        # The rest of the loader is not read.
        batches = list(islice(loader, 1))
        row_tokens = []
    else:
        named = name_batches()
        batches = []
        for indices, _ in named:
            batches.append(loader.collate_fn([loader.dataset[index] for index in indices]))
        row_tokens = [tokens for _, tokens in named if tokens is not None]
    if not batches:
        raise empty_loader()
    return PlannedBatches(batches, row_tokens)


def empty_loader() -> ConfigurationError:
    """Return the error of a loader that has no batch."""
    return ConfigurationError(
        "A step needs a batch, but the loader is empty: give it samples, or a smaller batch size where drop_last=True"
        " leaves none."
    )
