"""Report, once in a fit, a loss that is not finite or a step that never returns a loss.

A loss on the CPU is looked at in every step. A loss on another device is looked at every `log_every_n_steps` batches,
by a copy that nothing waits for, so no step waits for the device.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from equipoise.notices import warn
from equipoise.parallel.batches.splitting import entries_of
from equipoise.parallel.step_protocols import StepResult
from equipoise.to_device import ArrivingValue
from equipoise.trainer.diagnostics.nonfinite_outputs import NonFiniteOutputs

if TYPE_CHECKING:
    from equipoise.trainer.runtime.run_context import RunContext

__all__ = ["LossWatch"]

_ADVICE = " Trainer(detect_nonfinite=True) names the first module whose output is not finite."

_MOST_WINDOWS = (
    10  # accumulation windows that may be without a loss at the beginning: a few are often skipped on purpose
)

Watch = Callable[[StepResult, Any, int, bool], None]


class LossWatch:
    """Looks at the losses of one fit.

    Args:
        context: The run.

    Attributes:
        skipped: Number of calls of `training_step` that returned None.
    """

    def __init__(self, context: "RunContext") -> None:
        trainer = context.trainer
        self._trainer = trainer
        self._strategy = context.strategy
        self.skipped = 0
        self._has_seen_loss = False
        self._windows_without_loss = 0
        self._has_reported = False
        self._every = max(trainer.log_every_n_steps, 1)
        self._arriving: tuple[ArrivingValue, str] | None = None  # a loss and its place
        self._outputs: NonFiniteOutputs | None = None
        if trainer.detect_nonfinite:
            self._outputs = NonFiniteOutputs(context.module)
            self._outputs.start()

    def bind(self) -> Watch | None:
        """Return what the loop calls after each batch; None where nothing is to be looked at."""
        trainer = self._trainer
        if trainer.detect_nonfinite is False or trainer.barebones or self._has_reported:
            return None
        if self._outputs is not None or self._strategy.root_device.type == "cpu":
            return self._look_now
        return self._look_later

    def count_skipped(self) -> None:
        """Count a call of `training_step` that returned None."""
        self.skipped += 1

    def close(self) -> None:
        """End the watch. The last copy is read, since nothing is computed any more."""
        if self._outputs is not None:
            self._outputs.stop()
        self._read_arrived(wait=True)

    def _look_now(self, result: StepResult, batch: Any, index: int, last: bool) -> None:
        """Read the loss in the step."""
        loss = result.loss
        if loss is None:
            self._look_for_skips(last)
        else:
            self._has_seen_loss = True
            value = loss.item()
            if not math.isfinite(value) and not self._has_reported:
                self._report(value, self._place(index), self._explain(batch))
        if self._outputs is not None:
            self._outputs.clear()

    def _look_later(self, result: StepResult, batch: Any, index: int, last: bool) -> None:
        """Begin a copy of the loss now and then, and read the copy before."""
        loss = result.loss
        if loss is None:
            self._look_for_skips(last)
            return
        self._has_seen_loss = True
        if index % self._every == 0 and not self._has_reported:
            self._read_arrived()
            if self._arriving is None:
                self._arriving = (ArrivingValue(loss), self._place(index))

    def _read_arrived(self, *, wait: bool = False) -> None:
        """Read the loss that is on its way, if it has arrived."""
        if self._arriving is None:
            return
        arriving, place = self._arriving
        value = arriving.read(wait=wait)
        if value is None:
            return
        self._arriving = None
        if not math.isfinite(value) and not self._has_reported:
            self._report(
                value, place, f" The loss is looked at every {self._every} batches (log_every_n_steps).{_ADVICE}"
            )

    def _look_for_skips(self, last: bool) -> None:
        """Report if the first windows, or all of the first epoch, had no loss because the step returned none."""
        if not last or self._has_seen_loss or self._has_reported or not self.skipped:
            return
        self._windows_without_loss += 1
        if self._windows_without_loss < _MOST_WINDOWS and not self._trainer.fit_loop_state.batches_done():
            return
        self._has_seen_loss = True  # so that it is reported once
        warn(
            "`training_step` returned None for every batch so far, so nothing was trained. Return the loss, or a"
            " dictionary with the key 'loss'. If you skip these batches on purpose, ignore this warning."
        )

    def _place(self, index: int) -> str:
        progress = self._trainer.progress
        epoch = self._trainer.current_epoch
        place = f"step {progress.batches_that_stepped}, batch {index} of epoch {epoch} (counted from 0)"
        if self._strategy.world_size > 1:
            place += f", rank {self._strategy.global_rank}"
        return place

    def _explain(self, batch: Any) -> str:
        """Say where the values came from, as far as it is known."""
        bad = [f"batch{path}" for path, tensor in entries_of(batch) if not _is_finite(tensor)]
        if bad:
            return f" The batch itself is not finite: {', '.join(bad[:3])}."
        if self._outputs is None:
            return f" The batch is finite.{_ADVICE}"
        return f" {self._outputs.first() or 'All outputs of modules were finite, so the loss itself is the cause.'}"

    def _report(self, value: float, place: str, explanation: str) -> None:
        self._has_reported = True
        warn(f"The loss is {value} in {place}.{explanation}")


def _is_finite(tensor: Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return bool(tensor.isfinite().all())
