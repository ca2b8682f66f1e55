"""One device: the recorded batches, put together, and the run that computes them from the recorded state."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from equipoise.extensions.verification.recording import Batch, Recorder, Step
from equipoise.parallel.batches.gathering import gather
from equipoise.parallel.equality import Tolerance, gap_of
from equipoise.parallel.optimizer_parameters import optimizer_parameters

__all__ = ["Follower", "RecordedLoader", "recorded_loader"]


class RecordedLoader:
    """The whole batches of a recorded run, epoch by epoch.

    Args:
        batches: The batches that all processes computed at a time.
    """

    def __init__(self, batches: Sequence[Sequence[Batch]]) -> None:
        self._epochs: list[list[Any]] = []
        self._is_cut_off = not batches[-1][0].is_last
        epoch = None
        for together in batches:
            if together[0].epoch != epoch:
                epoch = together[0].epoch
                self._epochs.append([])
            self._epochs[-1].append(_joined(together))
        self._next = 0

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the next epoch."""
        batches = self._epochs[self._next]
        self._next += 1
        yield from batches
        if self._is_cut_off and self._next == len(self._epochs):
            # The run ends before this one; the loop looks ahead to know the last batch.
            yield batches[-1]


class _SizedLoader(RecordedLoader):
    """The same where the number of batches of an epoch is known."""

    def __init__(self, batches: Sequence[Sequence[Batch]]) -> None:
        super().__init__(batches)
        self._length = int(batches[0][0].length)

    def __len__(self) -> int:
        return self._length


def recorded_loader(recorder: Recorder) -> RecordedLoader:
    """Return a loader of what a run has recorded.

    Raises:
        StepError: If parts of a batch cannot be put together.
    """
    batches = list(zip(*recorder.batches, strict=True))
    if batches[0][0].length == float("inf"):
        return RecordedLoader(batches)
    return _SizedLoader(batches)


def _joined(together: Sequence[Batch]) -> Any:
    parts = [part for batch in together for part in batch.parts]
    if len(parts) == 1:
        return parts[0]
    sizes = [size for batch in together for size in batch.sizes]
    # They go to the device as any batch does.
    return gather(parts, sizes, torch.device("cpu"))


class Follower(Recorder):
    """Records a run on one device that follows a recorded one.

    It begins with the recorded weights, draws the recorded random numbers, and steps with the recorded gradients where
    they agree with its own: else rounding would grow from step to step, as Adam turns noise into steps.

    Args:
        recorded: The run that is followed.
        tolerance: The largest difference of gradients that rounding causes.
        alike: See `Recorder`.

    Attributes:
        recorded: The run that is followed.
    """

    def __init__(self, recorded: Recorder, tolerance: Tolerance, *, alike: bool) -> None:
        # It ends with the recorded batches, however many of them end with a step here.
        super().__init__(len(recorded.batches[0]) + 1, alike=alike)
        self.recorded = recorded
        self._tolerance = tolerance

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin with the recorded state."""
        pl_module.load_state_dict(self.recorded.initial, strict=False)
        super().on_train_start(trainer, pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Draw the recorded random numbers, if there is such a batch, and end after the last."""
        of_main = self.recorded.batches[0]
        if self._number < len(of_main):
            of_main[self._number].generators.restore()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Note the gradients, and step with the recorded ones that agree."""
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        number = len(self.steps) - 1
        if number < len(self.recorded.steps):
            self._take_recorded(optimizer, self.steps[-1], self.recorded.steps[number])

    def _take_recorded(self, optimizer: Any, computed_here: Step, recorded: Step) -> None:
        allowed = self._tolerance.of_gradients(computed_here.gradients.values())
        for parameter in optimizer_parameters(optimizer):
            name = self._names[id(parameter)]
            gradient = recorded.gradients.get(name)
            if gradient is None or parameter.grad is None:
                continue
            if not gap_of(computed_here.gradients[name], gradient, allowed):
                parameter.grad.copy_(gradient)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End after the last recorded batch."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._number >= len(self.recorded.batches[0]):
            trainer.should_stop = True
