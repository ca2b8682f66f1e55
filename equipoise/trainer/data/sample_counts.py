"""Number of samples of each batch, as the loader's batch sampler deals them.

A batch may hide its size, as a batch of graphs does, but the sampler that drew it knows it.
"""

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader, IterableDataset

__all__ = ["SampleCounts", "can_count"]


def can_count(loader: Any) -> bool:
    """Return whether a loader's batch sampler tells how many samples each of its batches has, in their order."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    # A loader with a state saves the position of its own sampler, which must not be exchanged.
    if callable(getattr(loader, "state_dict", None)):
        return False
    # Workers that deliver out of order break the correspondence of counts and batches.
    in_order = not loader.num_workers or getattr(loader, "in_order", True)
    return loader.batch_sampler is not None and in_order


class SampleCounts:
    """Counts the samples of the batches of a pass.

    Example:
        >>> counts = SampleCounts()
        >>> batches = list(counts.opened(DataLoader(range(5), batch_size=2)))
        >>> [counts.of(batch_idx) for batch_idx in range(4)]
        [2, 2, 1, None]
    """

    def __init__(self) -> None:
        self._counts: list[int | None] = []

    def of(self, batch_idx: int) -> int | None:
        """Return the number of samples of a batch of the present pass; None if it was not counted."""
        if batch_idx >= len(self._counts):
            return None
        return self._counts[batch_idx]

    def begin(self) -> list[int | None]:
        """Begin a pass, and return the list for its counts."""
        self._counts = []
        return self._counts

    def opened(self, loader: DataLoader[Any], open_loader: Callable[[Any], Iterator[Any]] = iter) -> Iterator[Any]:
        """Return a loader's iterator, whose samples are counted.

        The loader has its batch sampler back when this returns. Its setter refuses another one, so the exchange goes
        below it.

        Args:
            loader: The loader.
            open_loader: Function that opens it. Default: `iter`.
        """
        batch_sampler = loader.batch_sampler
        counting = _COUNTING.get(loader)
        if counting is None or counting.batch_sampler is not batch_sampler:
            counting = _COUNTING[loader] = self.counting(batch_sampler)
        counting.counts = self
        vars(loader)["batch_sampler"] = counting
        try:
            return open_loader(loader)
        finally:
            vars(loader)["batch_sampler"] = batch_sampler

    def counting(self, batch_sampler: Any) -> "_Counting":
        """Return a batch sampler that gives the batches of another and counts them."""
        return _Counting(self, batch_sampler)


class _Counting:
    """A batch sampler that gives the batches of another."""

    def __init__(self, counts: SampleCounts, batch_sampler: Any) -> None:
        self.counts = counts
        self.batch_sampler = batch_sampler

    def __iter__(self) -> Iterator[Any]:
        # Immediately, not with the first batch: some samplers draw their order here.
        return self._counted(iter(self.batch_sampler), self.counts.begin())

    def _counted(self, batches: Iterator[Any], counts: list[int | None]) -> Iterator[Any]:
        for batch in batches:
            counts.append(len(batch) if hasattr(batch, "__len__") else None)
            yield batch

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __getattr__(self, name: str) -> Any:
        # Copying and pickling ask for special methods of this object itself.
        if name.startswith("__"):
            raise AttributeError(name)
        # The `__iter__` of a loader's subclass may read other attributes of its sampler.
        return getattr(vars(self)["batch_sampler"], name)


# The batch samplers that count for a loader: the iterator of persistent workers asks that of its first pass.
_COUNTING: WeakKeyDictionary[DataLoader[Any], _Counting] = WeakKeyDictionary()
