"""Iterator that a step such as `training_step(dataloader_iter)` receives. It counts the batches that the step pulls."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from equipoise.errors import StepError
from equipoise.notices import rank_zero_warn
from equipoise.trainer.data.batch_stream import BatchStream
from equipoise.trainer.state.progress import Counts

__all__ = ["DataLoaderIter", "check_batch_size", "checking_batches"]

Pulled = tuple[Any, int, int]  # a batch, its index in the pass, and the index of its loader


class DataLoaderIter(Iterator[Pulled]):
    """The batches of one pass over a loader, as the step pulls them. They lie where the loader has put them.

    Args:
        batches: The batches that are left of the pass.
        stream: Knows the number of batches of the pass.
        counts: Its `ready` is the number of batches that were pulled in the pass.
        dataloader_idx: Index of the loader. Default: 0, as in training.

    Attributes:
        batch: The batch that was pulled last; None before the first.
        batch_idx: Its index; 0 before the first.
        is_overdrawn: Whether a batch was asked for when none was left.
    """

    def __init__(self, batches: Iterable[Any], stream: BatchStream, counts: Counts, dataloader_idx: int = 0) -> None:
        self._batches = iter(batches)
        self._stream = stream
        self._counts = counts
        self._dataloader_idx = dataloader_idx
        self.batch: Any = None
        self.batch_idx = max(counts.ready - 1, 0)
        self.is_overdrawn = False

    @property
    def length(self) -> int | None:
        """The number of batches of the pass; None if it is not known yet."""
        return self._stream.length

    @property
    def fetched(self) -> int:
        """The number of batches that were pulled in the pass."""
        return self._counts.ready

    @property
    def done(self) -> bool:
        """True if no batch is left."""
        return self.is_overdrawn or self._stream.length == self._counts.ready

    def __next__(self) -> Pulled:
        """Pull a batch.

        Returns:
            The batch, its index in the pass, and the index of its loader.

        Raises:
            StopIteration: If no batch is left.
        """
        try:
            batch = next(self._batches)
        except StopIteration:
            self.is_overdrawn = True
            raise
        # Hooks of the batch read these two after the step.
        self.batch = batch
        self.batch_idx = self._counts.ready
        self._counts.ready += 1
        return batch, self.batch_idx, self._dataloader_idx

    def end_pass(self, step: str, error: StopIteration, fetched_before: int) -> int:
        """End the pass after a step that has raised StopIteration, and return the number of batches that are lost.

        Args:
            step: The name of the step.
            error: The error that it has raised.
            fetched_before: Number of batches that were pulled before it.

        Raises:
            StepError: If the step has not asked for more batches than there are.
        """
        if not self.is_overdrawn:
            raise StepError(
                f"`{step}` raised StopIteration, though `dataloader_iter` was not asked for more batches than there"
                " are. Catch it in the step, or call `next(iterator, None)` of whatever iterator has ended."
            ) from error
        lost = self.fetched - fetched_before
        if lost:
            rank_zero_warn(
                f"`{step}` asked for more batches than its loader has, so its last step was not completed; {lost} of"
                f" {self.fetched} batches were pulled in it. Call `next(dataloader_iter, None)` to use what is left, or"
                " choose a number of batches that is a multiple of those of a step."
            )
        return lost


def check_batch_size(batch: Any) -> None:
    """Check that the size of a batch can be found, which is the weight of a value in the mean of the epoch.

    Raises:
        MisconfigurationException: If the step pulls batches by itself. The trainer cannot know which of them is
            meant.
    """
    if isinstance(batch, DataLoaderIter):
        raise MisconfigurationException(
            "`self.log(...)` takes a mean over the epoch, weighted by the number of samples. Only a step that pulls its"
            " batches from `dataloader_iter` itself knows that number. Pass it: `self.log(..., batch_size=n)`, or say"
            " on_epoch=False."
        )


def checking_batches(size_of: Callable[[Any, int | None], int | None]) -> Callable[[Any, int | None], int | None]:
    """Return a function that finds the size of a batch, and raises where a step pulls its batches by itself."""

    def checked(batch: Any, drawn: int | None) -> int | None:
        check_batch_size(batch)
        return size_of(batch, drawn)

    return checked
