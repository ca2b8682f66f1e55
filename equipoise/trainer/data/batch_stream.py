"""One pass over a loader: it knows its last batch, and a resumed run draws the same order and reads the rest.

How a pass finds its last batch follows from what is known of its length:

    certain     the batches are counted, without any Python code for a batch
    promised    they are read up to the promise, or until the loader ends
    unknown     each is delivered once the next one is read
"""

import itertools
import math
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from equipoise.interop.torch.loaders import with_sampler
from equipoise.notices import rank_zero_warn
from equipoise.parallel.batches.sampling import NO_BATCH
from equipoise.parallel.snapshot.random_state import drawn_alike
from equipoise.strategies.distributed.epoch_length import Certainty, Extent, draw_order
from equipoise.trainer.data.loader_state import Restarts, has_state
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
        own_limit: Largest number of batches that this process reads, where others may read more. Default: infinite.
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
        restarts: The last restart of each loader of several, in this pass.
    """

    def __init__(
        self,
        loader: Any,
        extent: Extent,
        *,
        combined: bool = False,
        before_opening: Callable[[Callable[[], Any]], None] | None = None,
        together: bool = False,
        own_limit: float = math.inf,
        on_wrong_length: Callable[[int, float, bool], None] | None = None,
        seed: int | None = None,
    ) -> None:
        self.loader = loader
        self.extent = extent
        self.combined = combined
        self._before_opening = before_opening
        self._together = together
        self._own_limit = min(own_limit, extent.limit)
        self._on_wrong_length = on_wrong_length
        self._seed = seed
        self.length: int | None = None
        if not math.isinf(extent.promised):
            self.length = int(extent.num_batches)
        self.ahead: Any = NOTHING
        self.indices: list[list[int]] = []
        self.even_steps = math.inf
        self.counts = SampleCounts()
        self.restarts = Restarts(loader.flattened if combined else [])
        self._iterator: Iterator[Any] | None = None

    def record_indices(self) -> bool:
        """Record the indices of samples, if a batch sampler tells them; call this before the stream starts."""
        loader = self.loader
        if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
            kind = type(loader).__name__
            rank_zero_warn(f"Couldn't infer the batch indices fetched from your dataloader: `{kind}`")
            return False
        from equipoise.trainer.data.batch_samplers import Recorder

        self.loader = with_sampler(loader, Recorder(loader.batch_sampler, self.indices), batches=True)
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
        from equipoise.trainer.data.batch_samplers import with_first_fetched

        self._draw_order()
        # 1. Pass over the batches that were read, if possible without loading them.
        # The batch that was read ahead comes from the checkpoint, so the loader's is dropped.
        # Other processes may have read more than this one may.
        passed_over = int(min(batches_read + (ahead is not NOTHING), self._own_limit))
        if not stateful and not self.combined and _can_skip(self.loader):
            batches = self._skip_unloaded(passed_over)
        else:
            batches = self._open()
            # A loader with a state stands after those that were read.
            to_drop = passed_over - batches_read if stateful else passed_over
            for _ in range(to_drop):
                next(batches, None)
            # A sampler draws its order when it is asked for the first batch.
            if not passed_over:
                batches = with_first_fetched(batches)
        # 2. Deliver the others.
        self._begin(batches, batches_read, ahead)

    def _skip_unloaded(self, count: int) -> Iterator[Any]:
        """Return an iterator after the first batches, without loading them."""
        from equipoise.trainer.data.batch_samplers import RemainingBatches

        remaining = RemainingBatches(self.counts.counting(self.loader.batch_sampler), count)
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
        if self.combined:
            return self._batches_of_all()
        if can_count(self.loader):
            return self.counts.opened(self.loader, open_loader)
        return open_loader(self.loader)

    def _batches_of_all(self) -> Iterator[Any]:
        """Open a CombinedLoader, which reads through `restarts` but shows its own loaders."""
        loaders = self.loader.flattened
        self.loader.flattened = self.restarts.begin()
        try:
            # It yields batch, batch index and loader index.
            return map(itemgetter(0), self.loader)
        finally:
            self.loader.flattened = loaders

    def _begin(self, batches: Iterator[Any], batches_read: int, ahead: Any = NOTHING) -> None:
        """Create the iterator over the batches that are left, for the kind of pass that this is."""
        if self.extent.certainty is not Certainty.AT_END:
            self._iterator = self._of_certain_length(_with_ahead(batches, ahead), batches_read)
        elif self.length is not None:
            self._iterator = self._of_promised_length(_with_ahead(batches, ahead), batches_read, self.length)
        else:
            self._iterator = self._of_unknown_length(batches, batches_read, ahead)

    # The number of batches is certain

    def _of_certain_length(self, batches: Iterator[Any], batches_read: int) -> Iterator[Any]:
        own_length, longest_length = self._find_length()
        # 1. Count the batches without Python code for each of them: `compress` takes a batch, then a number. As no
        #    number is 0, it lets all batches through. So the next number is one more than the batches that came.
        numbers = itertools.count(batches_read + 1)
        counted = itertools.compress(batches, numbers)
        # 2. `islice` ends the pass. If the loader ends before that, `chain` asks for what follows: the report.
        all_that_come = itertools.chain(counted, self._report_short_pass(own_length, numbers))
        batches = itertools.islice(all_that_come, max(0, own_length - batches_read))
        # 3. Take part in the steps of the process with the longest pass.
        if self._together:
            batches = itertools.chain(batches, itertools.repeat(NO_BATCH))
        return itertools.islice(batches, max(0, longest_length - batches_read))

    def _find_length(self) -> tuple[int, int]:
        """Read the length of a loader that is certain of it, and return that of this process and the longest."""
        own_length = longest_length = int(min(len(self.loader), self._own_limit))
        if self._together:
            from equipoise.parallel.communication.object_exchange import exchange_number

            lengths = exchange_number(own_length)
            longest_length = max(lengths)
            # Where processes share the samples of a step, the last step may have too few for all of them.
            self.even_steps = min(lengths) - 1
        self.length = longest_length
        if self.extent.certainty is Certainty.ONCE_DRAWN:
            self._note_length(longest_length)
        return own_length, longest_length

    def _report_short_pass(self, promised: int, numbers: Iterator[int]) -> Iterator[Any]:
        """Yield nothing. Asked for a batch, report that fewer came than were certain; see `_of_certain_length`."""
        came = next(numbers) - 1
        if not self._together:
            self.length = came
        if self._on_wrong_length is not None:
            self._on_wrong_length(promised, came, True)
        yield from ()

    # The loader promises a number

    def _of_promised_length(self, batches: Iterator[Any], batches_read: int, promised: int) -> Iterator[Any]:
        limit = self._own_limit
        if not self._together:
            limit = min(limit, promised)
        batches = self._limited(batches, batches_read, limit)
        if self._together:
            batches = self._until_all_are_done(batches, batches_read)
        return self._read_to_promise(batches, batches_read, promised)

    def _read_to_promise(self, batches: Iterator[Any], batches_read: int, promised: int) -> Iterator[Any]:
        """Yield the promised batches, or fewer where the data end before."""
        for index in range(batches_read, promised):
            batch = next(batches, NOTHING)
            if batch is NOTHING:
                self._note_length(index)
                return
            yield batch
            del batch

    # The number is unknown

    def _of_unknown_length(self, batches: Iterator[Any], batches_read: int, ahead: Any) -> Iterator[Any]:
        if self._together:
            # Some processes may have a batch ahead, and others none. All agree on each.
            batches = self._limited(_with_ahead(batches, ahead), batches_read, self._own_limit)
            batches = self._until_all_are_done(batches, batches_read)
            ahead = NOTHING
        else:
            batches = self._limited(batches, batches_read, self._own_limit)
        self.ahead = ahead
        if ahead is NOTHING:
            self.ahead = self._next(batches, batches_read)
        if self.ahead is NOTHING:
            self._note_length(batches_read)
        return self._read_ahead(batches, batches_read)

    def _read_ahead(self, batches: Iterator[Any], batches_read: int) -> Iterator[Any]:
        """Yield the batch that was read ahead, once the next one is read."""
        while self.ahead is not NOTHING:
            batch = self.ahead
            batches_read += 1
            self.length = None
            self.ahead = self._next(batches, batches_read)
            if self.ahead is NOTHING:
                self._note_length(batches_read)
            yield batch
            del batch

    def _next(self, batches: Iterator[Any], batches_read: int) -> Any:
        if batches_read >= self.extent.limit:
            return NOTHING
        return next(batches, NOTHING)

    # All kinds of passes

    def _limited(self, batches: Iterator[Any], batches_read: int, limit: float) -> Iterator[Any]:
        """Return the batches that this process may read, after those that were read before."""
        if math.isinf(limit):
            return batches
        return self._up_to(batches, int(max(0, limit - batches_read)))

    def _up_to(self, batches: Iterator[Any], count: int) -> Iterator[Any]:
        """Yield as many batches as this process may read. The loader need not know how to end after its length."""
        for left in reversed(range(count)):
            batch = next(batches, NOTHING)
            if batch is NOTHING:
                return
            if not left:
                self._let_loader_end(batches)
            yield batch
            # Do not hold the batch while the next one is read.
            del batch

    def _let_loader_end(self, batches: Iterator[Any]) -> None:
        """Let torch's own iterators, and loaders with a state, note the end of the pass; report batches beyond it."""
        loader = self.loader
        promised = self.extent.promised
        is_of_torch = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
        if self.extent.limit < promised or not (is_of_torch or has_state(loader)):
            return
        if next(batches, NOTHING) is not NOTHING and self._on_wrong_length is not None:
            self._on_wrong_length(int(promised), math.inf, False)

    def _until_all_are_done(self, batches: Iterator[Any], batches_read: int) -> Iterator[Any]:
        """Yield the batches of this process, then `NO_BATCH` while other processes have batches left."""
        from equipoise.parallel.communication.object_exchange import exchange_number

        for index in itertools.count(batches_read):
            batch = next(batches, NO_BATCH)
            have_batch = exchange_number(int(batch is not NO_BATCH))
            if not any(have_batch):
                return
            if not all(have_batch):
                self.even_steps = min(self.even_steps, index)
            yield batch
            del batch

    def _note_length(self, length: int) -> None:
        """Note the number of batches, and report it if another one was promised."""
        self.length = length
        promised = self.extent.num_batches
        if self._on_wrong_length is not None and not math.isinf(self.extent.promised) and length != promised:
            self._on_wrong_length(int(promised), length, False)


def _with_ahead(batches: Iterator[Any], ahead: Any) -> Iterator[Any]:
    """Return the batches after one that was read ahead, if there is one."""
    if ahead is NOTHING:
        return batches
    return itertools.chain([ahead], batches)


def _can_skip(loader: Any) -> bool:
    """Return True if batches of a loader can be left out without loading them.

    Workers draw random numbers for every batch they load, so with workers the batches must be loaded to leave their
    generators as they were.
    """
    if type(loader) is not DataLoader or loader.num_workers:
        return False
    return not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler is not None
