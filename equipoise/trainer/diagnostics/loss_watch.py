"""Report, once in a fit, a loss that is not finite or a step that never returns a loss.

A loss on the CPU is checked in every step. A loss on another device is checked every `log_every_n_steps` batches, by an
asynchronous copy, so no step waits for the device.
"""

import math
from collections.abc import Callable
from typing import Any, Protocol

from lightning.pytorch import LightningModule
from torch import Tensor

from equipoise.notices import warn
from equipoise.parallel.step_protocols import StepResult
from equipoise.strategies.strategy import Strategy
from equipoise.to_device import ArrivingValue
from equipoise.trainer.state.run_state import RunState
from equipoise.tree import entries_of

__all__ = ["LossWatch"]

_ADVICE = " Trainer(detect_nonfinite=True) names the first module whose output is not finite."

# Number of accumulation windows at the beginning that may have no loss: users often skip a few on purpose.
_MOST_WINDOWS = 10

# A function that the loop calls after each batch: with the result of the step, the batch, its index, and whether it is
# the last of its accumulation window.
Watch = Callable[[StepResult, Any, int, bool], None]


class _Step(Protocol):
    """A training step that knows whether it has ever returned None."""

    returned_none: bool


class LossWatch:
    """Checks the losses of one fit.

    Args:
        state: The settings and counters.
        module: The user's module.
        strategy: The strategy.
        batches_done: Returns whether the epoch came to its last batch.
    """

    # The step of the present epoch.
    _step: _Step

    def __init__(
        self, state: RunState, module: LightningModule, strategy: Strategy, batches_done: Callable[[], bool]
    ) -> None:
        self._state = state
        self._batches_done = batches_done
        self._strategy = strategy
        self._has_seen_loss = False
        self._windows_without_loss = 0
        self._has_reported = False
        self._every = max(self._state.log_every_n_steps, 1)
        # A loss on its way to the CPU, and its place.
        self._arriving: tuple[ArrivingValue, str] | None = None
        self._outputs: Any | None = None
        if self._state.detect_nonfinite:
            from equipoise.trainer.diagnostics.nonfinite_outputs import NonFiniteOutputs

            self._outputs = NonFiniteOutputs(module)
            self._outputs.start()

    def bind(self, step: _Step) -> Watch | None:
        """Return the function that the loop calls after each batch of an epoch; None if no loss is checked.

        Args:
            step: The training step of the epoch.
        """
        self._step = step
        if self._state.detect_nonfinite is False or self._state.barebones or self._has_reported:
            return None
        # With `detect_nonfinite=True` the user accepts that each step waits.
        if self._outputs is not None or self._strategy.root_device.type == "cpu":
            return self._check_now
        return self._check_later

    def close(self) -> None:
        """End the watch, and wait for the last copy."""
        if self._outputs is not None:
            self._outputs.stop()
        self._read_arrived(wait=True)

    def _check_now(self, result: StepResult, batch: Any, index: int, last: bool) -> None:
        """Read the loss in the step."""
        loss = result.loss
        if loss is None:
            self._check_skips(last)
        else:
            self._has_seen_loss = True
            value = loss.item()
            if not math.isfinite(value) and not self._has_reported:
                self._report(value, self._place(index), self._explain(batch))
        if self._outputs is not None:
            self._outputs.clear()

    def _check_later(self, result: StepResult, batch: Any, index: int, last: bool) -> None:
        """Begin a copy of the loss every few batches, and read the previous copy."""
        loss = result.loss
        if loss is None:
            self._check_skips(last)
            return
        self._has_seen_loss = True
        if index % self._every == 0 and not self._has_reported:
            self._read_arrived()
            # If the previous copy has not arrived yet, this loss is not checked.
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
        if math.isfinite(value) or self._has_reported:
            return
        explanation = f" The loss is looked at every {self._every} batches (log_every_n_steps).{_ADVICE}"
        self._report(value, place, explanation)

    def _check_skips(self, last: bool) -> None:
        """Report if the step returned None in all of the first windows, or in all of the first epoch."""
        # Only the end of a window counts, and only as long as there was no loss.
        if not last or not self._step.returned_none or self._has_seen_loss or self._has_reported:
            return
        # A few windows without a loss are allowed.
        self._windows_without_loss += 1
        if self._windows_without_loss < _MOST_WINDOWS and not self._batches_done():
            return
        # It is reported once.
        self._has_seen_loss = True
        warn(
            "`training_step` returned None for every batch so far, so nothing was trained. Return the loss, or a"
            " dictionary with the key 'loss'. If you skip these batches on purpose, ignore this warning."
        )

    def _place(self, index: int) -> str:
        progress = self._state.progress
        epoch = self._state.current_epoch
        place = f"step {progress.batches_that_stepped}, batch {index} of epoch {epoch} (counted from 0)"
        if self._strategy.processes.world_size > 1:
            place += f", rank {self._strategy.processes.rank}"
        return place

    def _explain(self, batch: Any) -> str:
        """Return a text about the origin of the values, as far as it is known."""
        entries = [f"batch{path}" for path, tensor in entries_of(batch) if not _is_finite(tensor)]
        if entries:
            return f" The batch itself is not finite: {', '.join(entries[:3])}."
        if self._outputs is None:
            return f" The batch is finite.{_ADVICE}"
        first_output = self._outputs.first()
        if first_output is None:
            return " All outputs of modules were finite, so the loss itself is the cause."
        return f" {first_output}"

    def _report(self, value: float, place: str, explanation: str) -> None:
        self._has_reported = True
        warn(f"The loss is {value} in {place}.{explanation}")


def _is_finite(tensor: Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isfinite().all())
    return True
