"""ProgressBar: redrawn by the clock, never in each step, and without waiting for a device.

Most batches cost one look at the clock. When a redraw is due, the tracks are updated and drawn:

    fit         Epoch 3/10  ━━━━━━━╸────────────  412/1095  38.2 it/s  0:11<0:18  loss 0.3124
                Validation  ━━━━━━━━━━━━━━━╸────  31/40  91.0 it/s  0:00<0:00
    validate, test, predict, and the sanity check: one line
"""

import math
from time import monotonic
from typing import Any

import rich
from lightning.pytorch.callbacks import ProgressBar as _LightningProgressBar

from equipoise.callbacks.callback import Callback
from equipoise.callbacks.copied_state import copied_state
from equipoise.callbacks.progress.display import Display
from equipoise.callbacks.progress.drawing import Drawing
from equipoise.callbacks.progress.latest_values import LatestValues
from equipoise.callbacks.progress.track import Track
from equipoise.errors import ConfigurationError
from equipoise.validation import is_number

__all__ = ["ProgressBar"]


class ProgressBar(_LightningProgressBar):
    """Show the progress of a run: epoch, batches, rate, elapsed and remaining time, values of `prog_bar=True`.

    On a terminal and in a notebook with ipywidgets it is redrawn in place. In a file it writes a plain line at an
    interval, and one at the end of each epoch. Epochs are counted from 1. Rates and times are those of training alone,
    or of validation alone. Values on CUDA are at most one redraw old; only a line that stays waits for its values.

    A subclass may override `get_metrics` to choose the values, and the descriptions (`train_description`, ...) to
    change the labels. The callback works in Lightning's Trainer, too.

    Args:
        refresh_seconds: Seconds between two redraws. Default: 0.2.
        plain_seconds: Seconds between two plain lines. Default: 10.
        leave: Leave the line of every finished epoch. Default: False, only the last one stays.

    Raises:
        ConfigurationError: If an interval is not a positive number.

    Example:
        >>> from equipoise import Trainer
        >>> Trainer(callbacks=[ProgressBar(leave=True)]).fit(model, datamodule=data)  # doctest: +SKIP
    """

    uses_outputs = False

    def __init__(self, *, refresh_seconds: float = 0.2, plain_seconds: float = 10.0, leave: bool = False) -> None:
        super().__init__()
        _check_interval("refresh_seconds", refresh_seconds)
        _check_interval("plain_seconds", plain_seconds)
        self.refresh_seconds = refresh_seconds
        self.plain_seconds = plain_seconds
        self.leave = leave
        self._enabled = True
        # Time of the next redraw.
        self._due = math.inf
        # Indices of the last batches, and of the present loader of an evaluation.
        self._train_batch = -1
        self._evaluation_batch = -1
        self._loader = 0
        self._drawing: Drawing | None = None
        # True while a line that stays is drawn: its values must be the last ones.
        self._wait_for_values = False
        self._current_trainer: Any = None
        self._source = "progress_bar_metrics"

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings, without the state of a run."""
        return copied_state(self, _due=math.inf, _drawing=None, _current_trainer=None)

    # Lightning's interface of progress bars

    @property
    def is_enabled(self) -> bool:
        """True if the bar draws."""
        return self._enabled

    def enable(self) -> None:
        """Draw again, from the next stage on."""
        self._enabled = True

    def disable(self) -> None:
        """Stop drawing, until `enable`."""
        self._enabled = False
        self._close(keep=False)

    def print(
        self, *args: Any, sep: str | None = " ", end: str | None = "\n", file: Any = None, flush: bool = False
    ) -> None:
        """Print as Python's `print` does, above the bar if it is drawn."""
        drawing = self._drawing
        if drawing is None or file is not None or not drawing.display.animated:
            print(*args, sep=sep, end=end, file=file, flush=flush)
            return
        # None stands for the default, as in Python's `print`.
        separator = " " if sep is None else sep
        ending = "\n" if end is None else end
        text = separator.join(map(str, args))
        drawing.display.write(text + ending)

    @property
    def trainer(self) -> Any:
        """The trainer of the latest `setup`.

        Raises:
            TypeError: If there was none yet.
        """
        if self._current_trainer is None:
            raise TypeError(
                "ProgressBar.trainer is known from the hook `setup` on, but no run has begun. Read it in a hook."
            )
        return self._current_trainer

    @property
    def train_description(self) -> str:
        """Label of an epoch's line."""
        epoch = self.trainer.current_epoch + 1
        last = self.trainer.max_epochs
        if last is None or last < 0:
            return f"Epoch {epoch}"
        digits = len(str(last))
        return f"Epoch {epoch:>{digits}}/{last}"

    @property
    def total_train_batches(self) -> float:
        """Number of batches of an epoch that begins now, up to `max_steps`; infinite if unknown."""
        trainer = self.trainer
        batches = math.inf
        if trainer.max_steps is not None and trainer.max_steps > 0:
            steps = trainer.max_steps - trainer.global_step
            batches = steps * trainer.accumulate_grad_batches
        return min(float(trainer.num_training_batches), batches)

    def get_metrics(self, trainer: Any, pl_module: Any) -> dict[str, Any]:
        """Return the values after the bar, by name: by default those logged with `prog_bar=True`.

        It is called when a redraw is due. Override it to add or to remove values.
        """
        drawing = self._drawing
        if drawing is None:
            return LatestValues().read(getattr(trainer, self._source), wait=True)
        return drawing.values.read(getattr(trainer, self._source), wait=self._wait_for_values)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Note the trainer. Only the main process draws."""
        self._current_trainer = trainer
        # `progress_bar_metrics` waits for the device; our trainer also has `progress_bar_values`, which does not.
        self._source = "progress_bar_metrics"
        if "progress_bar_values" in dir(trainer):
            self._source = "progress_bar_values"
        if not trainer.is_global_zero:
            self.disable()

    # Training

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start to draw, with the first batch at the latest: a resumed epoch has no start."""
        drawing = self._open(trainer, pl_module)
        if drawing is not None:
            drawing.start_fit()
            self._due = -math.inf

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the line of an epoch."""
        drawing = self._drawing
        if drawing is None:
            return
        has_left_line = self._keep_epoch(drawing)
        self._train_batch = -1
        epoch = Track(self.train_description, self.total_train_batches, monotonic())
        drawing.begin_epoch(epoch)
        self._draw_change(drawing, at_once=has_left_line)
        if drawing.awaits_first_batch:
            self._due = -math.inf

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Redraw if it is due."""
        self._train_batch = batch_idx
        if monotonic() >= self._due:
            self._draw_training()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop the clock. The line is finished later, when all values of the epoch are logged."""
        drawing = self._drawing
        if drawing is not None and drawing.epoch is not None:
            self._update(drawing)
            drawing.epoch.finish(monotonic())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the line of the last epoch."""
        drawing = self._drawing
        if drawing is None:
            return
        has_left_line = self._keep_epoch(drawing)
        if not has_left_line and drawing.epoch is not None:
            self._draw(drawing, stays=True)
        self._close(keep=not has_left_line)

    # Evaluation and prediction, as runs and inside an epoch

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin a line, below that of the epoch if there is one."""
        if trainer.sanity_checking:
            self._begin_evaluation(trainer, pl_module, self.sanity_check_description, trainer.num_sanity_val_batches)
        else:
            self._begin_evaluation(trainer, pl_module, self.validation_description, trainer.num_val_batches)

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin a line."""
        self._begin_evaluation(trainer, pl_module, self.test_description, trainer.num_test_batches)

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin a line."""
        self._begin_evaluation(trainer, pl_module, self.predict_description, trainer.num_predict_batches)

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Redraw if it is due."""
        self._evaluation_batch = batch_idx
        if dataloader_idx != self._loader:
            self._change_loader(dataloader_idx)
        if monotonic() >= self._due and self._drawing is not None:
            self._draw(self._drawing)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Return to the line of the epoch, or leave the line of a run of validation."""
        drawing = self._drawing
        if drawing is None:
            return
        if not drawing.fitting and not trainer.sanity_checking:
            self._leave_evaluation(drawing)
            return
        # After a sanity check the display stays for the training: a notebook would keep the widget of a closed one.
        drawing.end_evaluation(monotonic())
        if drawing.epoch is not None:
            self._draw_change(drawing)

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the line."""
        if self._drawing is not None:
            self._leave_evaluation(self._drawing)

    on_predict_end = on_test_end

    # End and failure

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Release the terminal; the line stays as it is."""
        self._close(keep=True)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Release the terminal."""
        self._close(keep=True)

    # Drawing

    def _open(self, trainer: Any, module: Any) -> Drawing | None:
        """Return the drawing, a new one if there is none; None if the bar is disabled."""
        if self._enabled and self._drawing is None:
            drawing = Drawing(trainer, module, Display(rich.get_console()))
            self._drawing = drawing
            self._wait_for_values = False
            self._due = monotonic() + self._interval(drawing)
        return self._drawing

    def _close(self, *, keep: bool) -> None:
        """Release the terminal, and leave the last lines on it or not."""
        drawing = self._drawing
        self._drawing = None
        self._due = math.inf
        if drawing is not None:
            drawing.display.close(keep=keep)

    def _interval(self, drawing: Drawing) -> float:
        if drawing.display.animated:
            return self.refresh_seconds
        return self.plain_seconds

    def _begin_evaluation(self, trainer: Any, module: Any, description: str, totals: float | list[float]) -> None:
        drawing = self._open(trainer, module)
        if drawing is None:
            return
        if drawing.epoch is not None:
            self._update(drawing)
        self._loader = 0
        self._evaluation_batch = -1
        # A trainer may report one number instead of a list.
        totals_of_loaders = totals if isinstance(totals, list) else [totals]
        drawing.begin_evaluation(description, totals_of_loaders, monotonic())
        self._draw_change(drawing)

    def _change_loader(self, dataloader_idx: int) -> None:
        """Begin the line of another loader, of which the first batch is done."""
        self._loader = dataloader_idx
        if self._drawing is not None:
            done = self._evaluation_batch + 1
            self._drawing.change_loader(dataloader_idx, done, monotonic())

    def _leave_evaluation(self, drawing: Drawing) -> None:
        """Leave the finished line of an evaluation."""
        if drawing.evaluation is not None:
            self._update(drawing)
            drawing.evaluation.finish(monotonic())
            self._draw(drawing, stays=True)
        self._close(keep=True)

    def _keep_epoch(self, drawing: Drawing) -> bool:
        """Write the line of an epoch that has ended, if such lines stay; return True if it was written."""
        epoch = drawing.epoch
        if epoch is None or not epoch.finished:
            return False
        if drawing.display.animated and not self.leave:
            return False
        metrics = self._metrics(drawing, wait=True)
        drawing.keep_epoch(epoch, metrics, monotonic())
        return True

    def _draw_training(self) -> None:
        """Redraw in the course of an epoch."""
        drawing = self._drawing
        if drawing is None:
            return
        if drawing.awaits_first_batch:
            self._note_first_batch(drawing)
            # The first plain line is written after one interval.
            if not drawing.display.animated:
                self._due = monotonic() + self.plain_seconds
                return
        self._draw(drawing)

    def _note_first_batch(self, drawing: Drawing) -> None:
        """Note the first batch of a fit. Its index tells whether the epoch is resumed."""
        drawing.note_first_batch()
        if drawing.epoch is None or self._train_batch > 0:
            # The batches before it have no part in the rate.
            done = self._train_batch + 1
            batches = float(self.trainer.num_training_batches)
            total = min(batches, self.total_train_batches + done)
            now = monotonic()
            epoch = Track(self.train_description, total, now)
            drawing.resume_epoch(epoch, done, now)

    def _draw_change(self, drawing: Drawing, *, at_once: bool = False) -> None:
        """Draw the start or end of a stage, unless there were many just now."""
        if drawing.draws_change(monotonic(), self.refresh_seconds, at_once=at_once):
            self._draw(drawing)

    def _draw(self, drawing: Drawing, *, stays: bool = False) -> None:
        """Draw now.

        Args:
            drawing: The drawing.
            stays: The lines are the last ones. Default: False.
        """
        self._update(drawing)
        metrics = self._metrics(drawing, wait=stays)
        now = monotonic()
        drawing.show(metrics, now)
        self._due = now + self._interval(drawing)

    def _update(self, drawing: Drawing) -> None:
        train_batches = self._train_batch + 1
        evaluation_batches = self._evaluation_batch + 1
        drawing.update(train_batches, evaluation_batches, monotonic())

    def _metrics(self, drawing: Drawing, *, wait: bool) -> dict[str, Any]:
        self._wait_for_values = wait
        metrics = dict(self.get_metrics(drawing.trainer, drawing.module))
        for callback in drawing.trainer.callbacks:
            # Others are Lightning's.
            if isinstance(callback, Callback):
                metrics |= callback.progress_values()
        return metrics


def _check_interval(name: str, seconds: object) -> None:
    if not is_number(seconds) or not 0 < seconds < math.inf:
        raise ConfigurationError(
            f"ProgressBar({name}=...) takes a positive number of seconds, but {seconds!r} was given."
            " To have no bar, say Trainer(enable_progress_bar=False)."
        )
