"""Number of batches of a pass: what the loaders promise, what limits it, and when it is certain."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from equipoise.parallel.batches.dealing import Turns
from equipoise.parallel.batches.sampling import DerivedSampler, SameOrder, UnpaddedDistributedSampler

__all__ = ["Certainty", "Extent", "certainty_of", "draw_order", "joined_extent", "length_of"]

_SAMPLERS = (
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
    UnpaddedDistributedSampler,
)


class Certainty(IntEnum):
    """When the number of batches of a pass is certain.

    Attributes:
        AT_REQUEST: The data set and torch's own samplers determine it, as long as the data set stays as it is.
        ONCE_DRAWN: The whole order is drawn when the pass begins.
        AT_END: The loader alone knows it; its length is a promise.
    """

    AT_REQUEST = 0
    ONCE_DRAWN = 1
    AT_END = 2


@dataclass(frozen=True)
class Extent:
    """Number of batches of a pass.

    Attributes:
        promised: Number that the loaders promise, without a limit; infinite if they promise none.
        limit: Largest number that is read. Default: infinite.
        certainty: When the number is certain. Default: at the end of the pass.
    """

    promised: float
    limit: float = math.inf
    certainty: Certainty = Certainty.AT_END

    @property
    def num_batches(self) -> float:
        """Number of batches as far as it is known beforehand; infinite if it is not."""
        return min(self.promised, self.limit)


def joined_extent(extents: Sequence[Extent]) -> Extent:
    """Return the extent of passes that begin and end together: the longest counts.

    Example:
        >>> joined_extent([Extent(3), Extent(5)]).promised
        5
    """
    return Extent(
        max(extent.promised for extent in extents),
        max(extent.limit for extent in extents),
        max(extent.certainty for extent in extents),
    )


def certainty_of(loader: Any) -> Certainty:
    """Return when the number of batches of a loader's pass is certain."""
    if isinstance(loader, Turns):
        return certainty_of(loader.loader)
    if type(loader) in (list, tuple):
        return Certainty.AT_REQUEST
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return Certainty.AT_END
    kind = type(loader)
    if kind.__iter__ is not DataLoader.__iter__ or kind.__len__ is not DataLoader.__len__:
        return Certainty.AT_END
    if loader.batch_sampler is None:
        return _certainty_of_sampler(loader.sampler)
    return _certainty_of_sampler(loader.batch_sampler)


def _certainty_of_sampler(sampler: Any) -> Certainty:
    kind = type(sampler)
    if kind in _SAMPLERS or kind in (list, tuple, range):
        return Certainty.AT_REQUEST
    if kind is BatchSampler:
        return _certainty_of_sampler(sampler.sampler)
    if isinstance(sampler, DerivedSampler):
        return _certainty_of_sampler(sampler.batch_sampler)
    if kind is SameOrder:
        # The length of the user's sampler may be wrong. That of the order is right.
        return min(_certainty_of_sampler(sampler.sampler), Certainty.ONCE_DRAWN)
    return Certainty.AT_END


def draw_order(loader: Any) -> None:
    """Draw the order of a loader whose number of batches is certain once it is drawn."""
    if isinstance(loader, Turns):
        loader = loader.loader
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while not isinstance(sampler, SameOrder):
        sampler = sampler.batch_sampler if isinstance(sampler, DerivedSampler) else sampler.sampler
    sampler.draw()


def length_of(loader: Any) -> int | None:
    """Return the length of a loader; None if it has none."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
