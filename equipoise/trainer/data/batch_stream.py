"""One pass over a loader: it knows its last batch, and a resumed run draws the same order and reads the rest."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from equipoise.interop.torch.loaders import with_sampler
from equipoise.notices import rank_zero_warn
from equipoise.trainer.data.row_loading import open_loader
from equipoise.trainer.data.sample_counts import SampleCounts, can_count

__all__ = ["NOTHING", "BatchStream", "length_of"]

# Stands for the absence of a batch: None may be a batch.
NOTHING: Any = object()


class BatchStream:
    """One pass over a loader.

    Args:
        loader: Any iterable of batches.
        limit: Number of batches, if it is known or bounded; infinite otherwise.
        combined: Whether `loader` is a CombinedLoader, which wraps each batch in a tuple.
        before_opening: Called with a function that opens the loader, before the loader is opened for this pass.

    Attributes:
        length: Number of batches; None until it is known. A loader without length is read one batch ahead, and the
            length is set when the last batch is handed out: the batch with index `length - 1` is the last.
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
        self.loader = loader
        self.limit = limit
        self.combined = combined
        self._before_opening = before_opening
        # `limit` alone does not tell the length: a loader without length may end before.
        self.length: int | None = None
        if not math.isinf(limit) and (combined or length_of(loader) is not None):
            self.length = int(limit)
        self.ahead: Any = NOTHING
        self._counts: SampleCounts | None = None
        self._iterator: Iterator[Any] | None = None

    def count_samples(self, counts: SampleCounts) -> None:
        """Count the samples of each batch if the loader tells them. Call this before the stream starts."""
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
        """Return a text for messages about a pass without a batch."""
        return (
            f"A {type(self.loader).__name__} without length gave no batch in this pass. It may be empty, or an"
            " iterator, which can be read once only: pass a DataLoader or a list to read it in every pass."
        )

    def resume(self, batches_read: int, *, ahead: Any = NOTHING, stateful: bool = False) -> None:
        """Continue a pass that an earlier process began.

        The order of the batches is drawn here, with every generator as it was when the pass began; the caller may set
        the generators afterwards.

        Args:
            batches_read: Number of batches that were read before.
            ahead: The batch that had been read ahead, if it is known.
            stateful: Whether the loader itself restores its position after them.
        """
        # 1. Pass over the batches that were read, if possible without loading them.
        if not stateful and not self.combined and _can_skip(self.loader):
            batches = self._skip_unloaded(batches_read)
        else:
            batches = self._open()
            if not stateful:
                for _ in range(batches_read):
                    next(batches, None)
            # The batch that was read ahead comes from the checkpoint, so the loader's is dropped.
            if ahead is not NOTHING:
                next(batches, None)
            # A sampler draws its order when it is asked for the first batch.
            elif not batches_read:
                batches = _with_first_fetched(batches)
        # 2. Deliver the others.
        self._begin(batches, batches_read, ahead)

    def _skip_unloaded(self, batches_read: int) -> Iterator[Any]:
        """Return an iterator behind the batches that were read before, without loading them."""
        sampler = self.loader.batch_sampler
        if self._counts is not None:
            sampler = self._counts.counting(sampler)
        remaining = _RemainingBatches(sampler, batches_read)
        batches = open_loader(with_sampler(self.loader, remaining, batches=True))
        remaining.draw_order()
        return batches

    def close(self) -> None:
        """Release the iterator, and the workers behind it."""
        self._iterator = None
        self.ahead = NOTHING

    def __iter__(self) -> Iterator[Any]:
        """Return the batches, started if `start` or `resume` was not called before."""
        if self._iterator is None:
            self.start()
        assert self._iterator is not None
        iterator = self._iterator
        # A second loop over the stream starts a pass of its own.
        self._iterator = None
        return iterator

    def _open(self) -> Iterator[Any]:
        if self._before_opening is not None:
            self._before_opening(self._iterate)
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        # A CombinedLoader yields batch, batch index and loader index.
        if self.combined:
            return (batch for batch, _, _ in self.loader)
        if self._counts is not None:
            return self._counts.opened(self.loader, open_loader)
        return open_loader(self.loader)

    def _begin(self, batches: Iterator[Any], read: int, ahead: Any = NOTHING) -> None:
        # A loader of known length needs no look ahead, and no generator in Python between it and the loop.
        if self.length is not None:
            self._iterator = itertools.islice(batches, max(0, self.length - read))
            return
        self._iterator = self._read_ahead(batches, read, ahead)
        # Run the generator up to the first batch.
        next(self._iterator)

    def _read_ahead(self, batches: Iterator[Any], read: int, ahead: Any) -> Iterator[Any]:
        """Read one batch ahead. The first value is None: by then the first batch has been fetched."""
        if ahead is NOTHING:
            ahead = self._next(batches, read)
        self.ahead = ahead
        del ahead
        if self.ahead is NOTHING:
            self.length = read
        yield None
        while self.ahead is not NOTHING:
            batch = self.ahead
            read += 1
            self.ahead = self._next(batches, read)
            if self.ahead is NOTHING:
                self.length = read
            yield batch
            # Do not hold the batch while the next one is read.
            del batch

    def _next(self, batches: Iterator[Any], read: int) -> Any:
        return next(batches, NOTHING) if read < self.limit else NOTHING


def _with_first_fetched(batches: Iterator[Any]) -> Iterator[Any]:
    """Fetch the first batch now, and return an iterator over all of them."""
    first = next(batches, NOTHING)
    if first is NOTHING:
        return batches
    return itertools.chain([first], batches)


def _can_skip(loader: Any) -> bool:
    """Return True if batches of a loader can be left out without loading them.

    Workers draw random numbers for every batch they load, so with workers the batches must be loaded to leave their
    generators as they were.
    """
    if type(loader) is not DataLoader or loader.num_workers:
        return False
    return not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler is not None


class _RemainingBatches:
    """A batch sampler without its first batches.

    A loader's iterator draws a random number after it has asked the batch sampler for an iterator, and a sampler draws
    the order when it is asked for its first batch. `draw_order` does that at the right moment.

    Args:
        batch_sampler: Samples all batches.
        skip: Number of batches to leave out.
    """

    def __init__(self, batch_sampler: Any, skip: int) -> None:
        self.batch_sampler = batch_sampler
        self.skip = skip
        self._indices: Iterator[Any] = iter(())

    def draw_order(self) -> None:
        """Draw the order, and leave out the first batches."""
        for _ in range(self.skip):
            next(self._indices, None)
        if not self.skip:
            self._indices = _with_first_fetched(self._indices)

    def __iter__(self) -> Iterator[Any]:
        self._indices = iter(self.batch_sampler)
        return self._rest()

    def _rest(self) -> Iterator[Any]:
        yield from self._indices

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip)


def length_of(loader: Any) -> int | None:
    """Return the length of a loader; None if it has none."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
