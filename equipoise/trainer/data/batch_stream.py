"""One pass over a loader that knows its last batch and can continue an earlier pass."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from equipoise.interop.torch.loaders import with_sampler
from equipoise.notices import rank_zero_warn
from equipoise.trainer.data.sample_counts import SampleCounts, can_count

__all__ = ["NOTHING", "BatchStream", "length_of"]

NOTHING: Any = object()  # stands for a batch that is not there


class BatchStream:
    """One pass over a loader.

    Args:
        loader: What is iterated.
        limit: The number of batches, if it is known or bounded; infinite otherwise.
        combined: Whether `loader` is a CombinedLoader, which wraps each batch in a tuple.
        before_opening: Called with a function that opens the loader, before the loader is opened for this pass.

    Attributes:
        length: The number of batches; None until it is known. A loader without length is read one batch ahead, and
            the length is set when the last batch is handed out: the batch with index `length - 1` is the last.
        ahead: The batch that was read ahead.
    """

    def __init__(
        self,
        loader: Any,
        limit: float,
        *,
        combined: bool = False,
        before_opening: Callable[[Callable[[], Any]], None] | None = None,
    ) -> None:
        self.loader, self.limit, self.combined = loader, limit, combined
        self._before_opening = before_opening
        sized = not math.isinf(limit) and (combined or length_of(loader) is not None)
        self.length: int | None = int(limit) if sized else None
        self.ahead: Any = NOTHING
        self._counts: SampleCounts | None = None
        self._iterator: Iterator[Any] | None = None

    def count_samples(self, counts: SampleCounts) -> None:
        """Count the samples of each batch where the loader can tell; called before the stream starts."""
        counts.begin()
        if not self.combined and can_count(self.loader):
            self._counts = counts

    def start(self) -> None:
        """Create the iterator; for a loader without length, fetch the first batch and warn if there is none."""
        self._begin(self._open(), 0)
        if self.is_empty:
            rank_zero_warn(self.describe_empty())

    @property
    def is_empty(self) -> bool:
        """True if a loader without length turned out to have no batch in this pass."""
        return self.length == 0 < self.limit

    def describe_empty(self) -> str:
        """Return what a message says about a pass without a batch."""
        return (
            f"A {type(self.loader).__name__} without length gave no batch in this pass. It may be empty, or an"
            " iterator, which can be read once only: pass a DataLoader or a list to read it in every pass."
        )

    def resume(self, seen: int, *, ahead: Any = NOTHING, stateful: bool = False) -> None:
        """Goes on in a pass that was begun before.

        The order of the batches is settled here, with every generator as it was when the pass began; whoever calls this
        may set the generators afterwards.

        Args:
            seen: The number of batches that were seen.
            ahead: The batch that had been read ahead, if it is known.
            stateful: Whether the loader itself goes on after them.
        """
        if not stateful and not self.combined and _can_skip(self.loader):
            sampler = self.loader.batch_sampler
            indices = _Skip(sampler if self._counts is None else self._counts.counting(sampler), seen)
            batches: Iterator[Any] = iter(with_sampler(self.loader, indices, batches=True))
            indices.settle()
        else:
            batches = self._open()
            for _ in range(0 if stateful else seen):
                next(batches, None)
            if ahead is not NOTHING:
                next(batches, None)
            elif not seen:
                batches = _peeked(batches)
        self._begin(batches, seen, ahead)

    def close(self) -> None:
        """Lets go of the iterator, and of the workers behind it."""
        self._iterator, self.ahead = None, NOTHING

    def __iter__(self) -> Iterator[Any]:
        """The batches."""
        if self._iterator is None:
            self.start()
        assert self._iterator is not None
        iterator, self._iterator = self._iterator, None
        return iterator

    def _open(self) -> Iterator[Any]:
        if self._before_opening is not None:
            self._before_opening(self._iterate)
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        if self.combined:
            return (batch for batch, _, _ in self.loader)
        return iter(self.loader) if self._counts is None else self._counts.opened(self.loader)

    def _begin(self, batches: Iterator[Any], read: int, ahead: Any = NOTHING) -> None:
        if self.length is not None:
            self._iterator = itertools.islice(batches, max(0, self.length - read))
            return
        self._iterator = self._read_ahead(batches, read, ahead)
        next(self._iterator)  # runs up to the first batch

    def _read_ahead(self, batches: Iterator[Any], read: int, ahead: Any) -> Iterator[Any]:
        """Reads one batch ahead. The first value is None: by then the first batch has been fetched."""
        self.ahead = self._next(batches, read) if ahead is NOTHING else ahead
        if self.ahead is NOTHING:
            self.length = read
        yield None
        while self.ahead is not NOTHING:
            batch, read = self.ahead, read + 1
            self.ahead = self._next(batches, read)
            if self.ahead is NOTHING:
                self.length = read
            yield batch
            del batch

    def _next(self, batches: Iterator[Any], read: int) -> Any:
        return next(batches, NOTHING) if read < self.limit else NOTHING


def _peeked(batches: Iterator[Any]) -> Iterator[Any]:
    """The same batches, the first of them fetched."""
    first = next(batches, NOTHING)
    return batches if first is NOTHING else itertools.chain([first], batches)


def _can_skip(loader: Any) -> bool:
    """Whether batches of a loader can be left out without loading them.

    Workers draw random numbers for every batch they load, so with workers the batches must be loaded to leave their
    generators as they were.
    """
    simple = type(loader) is DataLoader and not loader.num_workers and not isinstance(loader.dataset, IterableDataset)
    return simple and loader.batch_sampler is not None


class _Skip:
    """A batch sampler without its first batches.

    Making an iterator draws a random number after it has asked the sampler for one, and a sampler draws the order when
    it is asked for its first batch: `settle` does that in time.
    """

    def __init__(self, batch_sampler: Any, skip: int) -> None:
        self.batch_sampler, self.skip = batch_sampler, skip
        self._indices: Iterator[Any] = iter(())

    def settle(self) -> None:
        """Draws the order, and leaves out the first batches."""
        for _ in range(self.skip):
            next(self._indices, None)
        if not self.skip:
            self._indices = _peeked(self._indices)

    def __iter__(self) -> Iterator[Any]:
        self._indices = iter(self.batch_sampler)
        return self._rest()

    def _rest(self) -> Iterator[Any]:
        yield from self._indices

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip)


def length_of(loader: Any) -> int | None:
    """The length of a loader, None if it has none."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
