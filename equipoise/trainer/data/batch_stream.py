"""One pass over a loader: it knows its last batch, and a resumed run draws the same order and reads the rest."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from equipoise.interop.torch.loaders import with_sampler
from equipoise.notices import rank_zero_warn
from equipoise.parallel.batches.sampling import NO_BATCH
from equipoise.parallel.snapshot.random_state import drawn_alike
from equipoise.strategies.distributed.epoch_length import Certainty, Extent, draw_order, length_of
from equipoise.trainer.data.loader_state import has_state
from equipoise.trainer.data.row_loading import open_loader
from equipoise.trainer.data.sample_counts import SampleCounts, can_count

__all__ = ["NOTHING", "BatchStream"]

# Stands for the absence of a batch: None may be a batch.
NOTHING: Any = object()


class BatchStream:
    """One pass over a loader.

    Args:
        loader: Any iterable of batches.
        extent: Number of batches, as far as it is known.
        combined: Whether `loader` is a CombinedLoader, which wraps each batch in a tuple.
        before_opening: Called with a function that opens the loader, before the loader is opened for this pass.
        together: Whether all processes take part in each step, so that the pass ends when the last one has no batch
            left. A process without one reads `NO_BATCH`. Default: False.
        limit_here: Largest number of batches that this process reads, where others may read more. Default: infinite.
        on_wrong_length: Called with the number of batches that were promised and the number that came, infinite for
            more, if they differ, and with whether the promise was certain.
        seed: Seed of the random numbers with which all processes read. Default: None, each draws numbers of its own.

    Attributes:
        length: Number of batches; None until it is known. The batch with index `length - 1` is the last. A length that
            is certain is read anew whenever the loader is opened. If only the end of the pass tells the number,
            `length` is what the loader promises; it is not read beyond that. A loader without length is read one batch
            ahead.
        ahead: The batch that was read ahead.
        counts: The number of samples of each batch, where the loader tells it.
        indices: Indices of the samples in each batch of the present pass that was drawn; see `record_indices`.
        even_steps: Number of first steps for which each process is known to have a batch. In later ones a process may
            be without one. Infinite if no process has been without a batch so far.
    """

    def __init__(
        self,
        loader: Any,
        extent: Extent,
        *,
        combined: bool = False,
        before_opening: Callable[[Callable[[], Any]], None] | None = None,
        together: bool = False,
        limit_here: float = math.inf,
        on_wrong_length: Callable[[int, float, bool], None] | None = None,
        seed: int | None = None,
    ) -> None:
        self.loader = loader
        self.extent = extent
        self.combined = combined
        self._before_opening = before_opening
        self._together = together
        self._limit_here = min(limit_here, extent.limit)
        self._on_wrong_length = on_wrong_length
        self._seed = seed
        self.length: int | None = None
        if not math.isinf(extent.promised):
            self.length = int(extent.num_batches)
        self.ahead: Any = NOTHING
        self.indices: list[list[int]] = []
        self.even_steps = math.inf
        self.counts = SampleCounts()
        self._iterator: Iterator[Any] | None = None

    def record_indices(self) -> bool:
        """Record the indices of samples, if a batch sampler tells them; call this before the stream starts."""
        loader = self.loader
        if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
            kind = type(loader).__name__
            rank_zero_warn(f"Couldn't infer the batch indices fetched from your dataloader: `{kind}`")
            return False
        self.loader = with_sampler(loader, _Recorder(loader.batch_sampler, self.indices), batches=True)
        return True

    def start(self) -> None:
        """Create the iterator; for a loader without length, fetch the first batch and warn if there is none."""
        self._draw_order()
        self._begin(self._open(), 0)
        # Where none is promised, other processes have some.
        if self.is_empty and self.extent.promised:
            rank_zero_warn(self.describe_empty())

    @property
    def is_empty(self) -> bool:
        """True if the loader turned out to have no batch in this pass."""
        return self.length == 0 < self.extent.limit

    def describe_empty(self) -> str:
        """Return a text for messages about a pass without a batch."""
        kind = type(self.loader).__name__
        if math.isinf(self.extent.promised):
            kind += " without length"
        return (
            f"A {kind} gave no batch in this pass. It may be empty, or an iterator, which can be"
            " read once only: pass a DataLoader or a list to read it in every pass."
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
        self._draw_order()
        # 1. Pass over the batches that were read, if possible without loading them.
        # The batch that was read ahead comes from the checkpoint, so the loader's is dropped.
        # Other processes may have read more than this one may.
        passed_over = int(min(batches_read + (ahead is not NOTHING), self._limit_here))
        if not stateful and not self.combined and _can_skip(self.loader):
            batches = self._skip_unloaded(passed_over)
        else:
            batches = self._open()
            # A loader with a state stands after those that were read.
            for _ in range(batches_read if stateful else 0, passed_over):
                next(batches, None)
            # A sampler draws its order when it is asked for the first batch.
            if not passed_over:
                batches = _with_first_fetched(batches)
        # 2. Deliver the others.
        self._begin(batches, batches_read, ahead)

    def _skip_unloaded(self, count: int) -> Iterator[Any]:
        """Return an iterator after the first batches, without loading them."""
        remaining = _RemainingBatches(self.counts.counting(self.loader.batch_sampler), count)
        batches = open_loader(with_sampler(self.loader, remaining, batches=True))
        remaining.draw_order()
        return batches

    def close(self) -> None:
        """Release the iterator, and its workers."""
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

    def _draw_order(self) -> None:
        if self.extent.certainty is Certainty.ONCE_DRAWN:
            draw_order(self.loader)

    def _open(self) -> Iterator[Any]:
        if self._before_opening is not None:
            self._before_opening(self._iterate)
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        if self._seed is None:
            return self._batches()
        return drawn_alike(self._batches, self._seed)

    def _batches(self) -> Iterator[Any]:
        # A CombinedLoader yields batch, batch index and loader index.
        if self.combined:
            return (batch for batch, _, _ in self.loader)
        if can_count(self.loader):
            return self.counts.opened(self.loader, open_loader)
        return open_loader(self.loader)

    def _begin(self, batches: Iterator[Any], read: int, ahead: Any = NOTHING) -> None:
        is_certain = self.extent.certainty is not Certainty.AT_END
        # Some processes may have a batch ahead, and others none. All agree on each.
        if ahead is not NOTHING and (is_certain or self._together or self.length is not None):
            batches = itertools.chain([ahead], batches)
            ahead = NOTHING
        if is_certain:
            self._iterator = self._of_certain_length(batches, read)
            return
        here = self._limit_here
        if self.length is not None and not self._together:
            here = min(here, self.length)
        if not math.isinf(here):
            batches = self._up_to(batches, int(max(0, here - read)))
        if self._together:
            batches = self._until_all_are_done(batches, read)
        if self.length is not None:
            self._iterator = self._read_to_promise(batches, read, self.length)
            return
        self.ahead = ahead
        if ahead is NOTHING:
            self.ahead = self._next(batches, read)
        if self.ahead is NOTHING:
            self._end(read)
        self._iterator = self._read_ahead(batches, read)

    def _of_certain_length(self, batches: Iterator[Any], read: int) -> Iterator[Any]:
        """Return batches whose number is certain: without look ahead, and no code in Python before the loop."""
        here, everywhere = self._find_length()
        # Each number is drawn after its batch.
        numbers = itertools.count(read + 1)
        counted = itertools.compress(batches, numbers)
        batches = itertools.islice(itertools.chain(counted, self._end_short(here, numbers)), max(0, here - read))
        if self._together:
            batches = itertools.chain(batches, itertools.repeat(NO_BATCH))
        return itertools.islice(batches, max(0, everywhere - read))

    def _find_length(self) -> tuple[int, int]:
        """Read the length of a loader that is certain of it, and return that of this process and the longest."""
        length = length_of(self.loader)
        assert length is not None
        here = everywhere = int(min(length, self._limit_here))
        if self._together:
            from equipoise.parallel.communication.object_exchange import exchange_number

            lengths = exchange_number(here)
            everywhere = max(lengths)
            # Where processes share the samples of a step, the last step may have too few for all of them.
            self.even_steps = min(lengths) - 1
        self.length = everywhere
        if self.extent.certainty is Certainty.ONCE_DRAWN:
            self._end(everywhere)
        return here, everywhere

    def _end_short(self, promised: int, numbers: Iterator[int]) -> Iterator[Any]:
        """Report that the batches of a certain length ended before it; asked for a batch only in this case."""
        came = next(numbers) - 1
        if not self._together:
            self.length = came
        if self._on_wrong_length is not None:
            self._on_wrong_length(promised, came, True)
        yield from ()

    def _end(self, length: int) -> None:
        """Note the number of batches, and report it if another one was promised."""
        self.length = length
        promised = self.extent.num_batches
        if self._on_wrong_length is not None and not math.isinf(self.extent.promised) and length != promised:
            self._on_wrong_length(int(promised), length, False)

    def _up_to(self, batches: Iterator[Any], count: int) -> Iterator[Any]:
        """Yield as many batches as this process may read. The loader need not know how to end after its length."""
        for left in reversed(range(count)):
            batch = next(batches, NOTHING)
            if batch is NOTHING:
                return
            if not left:
                self._end_pass(batches)
            yield batch
            # Do not hold the batch while the next one is read.
            del batch

    def _end_pass(self, batches: Iterator[Any]) -> None:
        """Let torch's own iterators, and loaders with a state, note the end of the pass; report batches beyond it."""
        loader = self.loader
        promised = self.extent.promised
        is_of_torch = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
        if self.extent.limit < promised or not (is_of_torch or has_state(loader)):
            return
        if next(batches, NOTHING) is not NOTHING and self._on_wrong_length is not None:
            self._on_wrong_length(int(promised), math.inf, False)

    def _read_to_promise(self, batches: Iterator[Any], read: int, promised: int) -> Iterator[Any]:
        """Yield the promised batches, or fewer where the data end before."""
        for index in range(read, promised):
            batch = next(batches, NOTHING)
            if batch is NOTHING:
                self._end(index)
                return
            yield batch
            del batch

    def _read_ahead(self, batches: Iterator[Any], read: int) -> Iterator[Any]:
        """Yield the batch that was read ahead, once the next one is read."""
        while self.ahead is not NOTHING:
            batch = self.ahead
            read += 1
            self.length = None
            self.ahead = self._next(batches, read)
            if self.ahead is NOTHING:
                self._end(read)
            yield batch
            del batch

    def _next(self, batches: Iterator[Any], read: int) -> Any:
        if read >= self.extent.limit:
            return NOTHING
        return next(batches, NOTHING)

    def _until_all_are_done(self, batches: Iterator[Any], read: int) -> Iterator[Any]:
        """Yield the batches of this process, then `NO_BATCH` while other processes have batches left."""
        from equipoise.parallel.communication.object_exchange import exchange_number

        for index in itertools.count(read):
            batch = next(batches, NO_BATCH)
            have_batch = exchange_number(int(batch is not NO_BATCH))
            if not any(have_batch):
                return
            if not all(have_batch):
                self.even_steps = min(self.even_steps, index)
            yield batch
            del batch


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


class _Recorder:
    """A batch sampler that records the batches of another."""

    def __init__(self, batch_sampler: Any, indices: list[list[int]]) -> None:
        self.batch_sampler = batch_sampler
        self.indices = indices

    def __iter__(self) -> Iterator[Any]:
        # Workers read ahead, so the list may be longer than the number of batches delivered.
        self.indices.clear()
        for batch in self.batch_sampler:
            self.indices.append(list(batch))
            yield batch

    def __len__(self) -> int:
        return len(self.batch_sampler)
