"""Steps of an evaluation that pull their batches themselves: `validation_step(self, dataloader_iter)` and the like.

As in training, the hooks before a step receive the batch that was pulled last, and those behind it the last one that it
has pulled. Counters count steps. A step that asks for more batches than its loader has is not completed: its
StopIteration ends the loader.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from equipoise.errors import StepError
from equipoise.interop.lightning.self_log import CURRENT_HOOK
from equipoise.notices import rank_zero_warn
from equipoise.trainer.data.batch_stream import BatchStream
from equipoise.trainer.data.dataloader_iter import DataLoaderIter
from equipoise.trainer.evaluation.evaluation_step import EvaluationStep
from equipoise.trainer.state.progress import BatchProgress, Counts

if TYPE_CHECKING:
    from equipoise.trainer.runtime.run_context import RunContext

__all__ = ["IteratorSteps"]


class IteratorSteps:
    """The steps over one loader. Iterating over them runs them, and gives the output of each.

    Args:
        context: The run.
        word: The stage as in on_validation_start and test_step.
        stream: The pass over the loader.
        action: The name of the reading of a batch in a profile.
        progress: Counts the steps over all loaders.
        dataloader_idx: Index of the loader.
        several: Whether there are several loaders.
        final: Whether this one is the last.

    Attributes:
        iterator: What the step pulls its batches from.
    """

    def __init__(
        self,
        context: "RunContext",
        word: str,
        stream: BatchStream,
        action: str,
        progress: BatchProgress,
        dataloader_idx: int,
        *,
        several: bool,
        final: bool,
    ) -> None:
        self._context = context
        self._name = f"{word}_step"
        self._step = EvaluationStep(context, self._name)
        self._batch_start = context.hooks.bind(f"on_{word}_batch_start")
        self._progress = progress
        self._final = final
        # The index of the loader is an argument of hooks, and a part of names, only if there are several.
        self._loader_index: tuple[int, ...] = ()
        self._log_index = None
        if several:
            self._loader_index = (dataloader_idx,)
            self._log_index = dataloader_idx
        batches = context.batches(stream, action)
        self.iterator = DataLoaderIter(batches, stream, Counts(), dataloader_idx)

    @property
    def indices(self) -> tuple[int, ...]:
        """The index of the batch that was pulled last, and of the loader, where there are several."""
        return (self.iterator.batch_idx, *self._loader_index)

    def __iter__(self) -> Iterator[Any]:
        iterator = self.iterator
        progress = self._progress
        counts = progress.current
        while not iterator.done:
            fetched = iterator.fetched
            counts.make_ready()
            progress.mark_last(False)
            self._context.logs.begin_batch(iterator, self._log_index)
            if self._batch_start is not None:
                self._batch_start(iterator.batch, *self.indices)
            counts.start()
            try:
                output = self._context.strategy.evaluate(self._step, (iterator,))
            except StopIteration as error:
                self._leave(error, fetched)
                return
            counts.process()
            progress.mark_last(self._final and iterator.done)
            yield output
            # Its memory is free before the next step.
            del output

    def _leave(self, error: StopIteration, fetched: int) -> None:
        """End the loader after a step that asked for more batches than there are.

        Args:
            error: What the step has raised.
            fetched: Number of batches that were pulled before it.

        Raises:
            StepError: If it has another cause.
        """
        # The step did not return.
        vars(self._context.module)[CURRENT_HOOK] = None
        if not self.iterator.is_overdrawn:
            raise StepError(
                f"`{self._name}` raised StopIteration, though `dataloader_iter` was not asked for more batches than"
                " there are. Catch it in the step, or call `next(iterator, None)` of whatever iterator has ended."
            ) from error
        lost = self.iterator.fetched - fetched
        if lost:
            rank_zero_warn(
                f"`{self._name}` asked for more batches than its loader has, so its last step was not completed; {lost}"
                f" of {self.iterator.fetched} batches were pulled in it. Call `next(dataloader_iter, None)` to evaluate"
                " what is left, or choose a number of batches that is a multiple of those of a step."
            )
        self._context.logs.end_batch()
        self._progress.rewind()
        self._progress.mark_last(self._final)
