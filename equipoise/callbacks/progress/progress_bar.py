"""ProgressBar: redrawn by the clock, never in each step, and without waiting for a device.

Most batches cost one look at the clock. When a redraw is due, the tracks are updated and drawn:

    fit         Epoch 3/10  ━━━━━━━╸────────────  412/1095  38.2 it/s  0:11<0:18  loss 0.3124
                Validation  ━━━━━━━━━━━━━━━╸────  31/40  91.0 it/s  0:00<0:00
    validate, test, predict, and the sanity check: one line
"""

import math
from collections import deque
from time import monotonic
from typing import Any

import rich
from lightning.pytorch.callbacks import ProgressBar as _LightningProgressBar

from equipoise.callbacks.callback import Callback
from equipoise.callbacks.copied_state import copied_state
from equipoise.callbacks.progress.display import Display
from equipoise.callbacks.progress.latest_values import LatestValues
from equipoise.callbacks.progress.layout import Layout, plain_line
from equipoise.callbacks.progress.track import Track
from equipoise.errors import ConfigurationError
from equipoise.validation import is_number

__all__ = ["ProgressBar"]

# Changes that are drawn immediately in one refresh interval; further changes wait for the next redraw.
_MOST_IMMEDIATE = 4


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
        leave: Leave the line of every finished epoch (True), or of the last one alone (False). Default: None, those of
            epochs that end a redraw apart.

    Raises:
        ConfigurationError: If an interval is not a positive number.

    Example:
        >>> from equipoise import Trainer
        >>> Trainer(callbacks=[ProgressBar(leave=False)]).fit(model, datamodule=data)  # doctest: +SKIP
    """

    uses_outputs = False

    def __init__(self, *, refresh_seconds: float = 0.2, plain_seconds: float = 10.0, leave: bool | None = None) -> None:
        super().__init__()
        _check_interval("refresh_seconds", refresh_seconds)
        _check_interval("plain_seconds", plain_seconds)
        self.refresh_seconds = refresh_seconds
        self.plain_seconds = plain_seconds
        self.leave = leave
        self._enabled = True
        self._current_trainer: Any = None
        # The attribute of the trainer with the values.
        self._name_of_values = "progress_bar_metrics"
        self._forget_run()

    def _forget_run(self) -> None:
        self._display: Display | None = None
        # The user's module, and the readers of values and lines.
        self._module: Any = None
        self._latest_values = LatestValues()
        self._layout = Layout()
        # True while a line that stays is drawn: its values must be the last ones.
        self._wait_for_values = False
        # Times of the next redraw, of the next line that stays, and of the last changes that were drawn immediately.
        self._next_redraw = math.inf
        self._next_line = -math.inf
        self._drawn_changes: deque[float] = deque(maxlen=_MOST_IMMEDIATE)
        # Whether training has started, and whether its first batch is done, whose index shows where a resumed epoch
        # begins.
        self._is_fitting = False
        self._is_first_batch_done = False
        # The track of the epoch, and that of a validation inside the epoch or of a stage by itself.
        self._epoch_track: Track | None = None
        self._evaluation_track: Track | None = None
        # Indices of the last batches, and of the present loader of an evaluation.
        self._train_batch_idx = -1
        self._evaluation_batch_idx = -1
        self._loader_index = 0
        # The label of an evaluation, and the number of batches of each of its loaders.
        self._evaluation_label = ""
        self._loader_totals: list[float] = []

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings, without the state of a run."""
        return copied_state(
            self,
            _current_trainer=None,
            _display=None,
            _next_redraw=math.inf,
            _epoch_track=None,
            _evaluation_track=None,
            _module=None,
            _latest_values=LatestValues(),
        )

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
        display = self._display
        if display is None or file is not None or not display.animated:
            print(*args, sep=sep, end=end, file=file, flush=flush)
            return
        # None stands for the default, as in Python's `print`.
        separator = " " if sep is None else sep
        ending = "\n" if end is None else end
        display.write(separator.join(map(str, args)) + ending)

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
        values = getattr(trainer, self._name_of_values)
        if self._display is None:
            return LatestValues().read(values, wait=True)
        return self._latest_values.read(values, wait=self._wait_for_values)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Note the trainer. Only the main process draws."""
        self._current_trainer = trainer
        # Of Lightning's trainer `progress_bar_metrics`, which waits for the device; of ours also `progress_bar_values`.
        self._name_of_values = "progress_bar_metrics"
        if "progress_bar_values" in dir(trainer):
            self._name_of_values = "progress_bar_values"
        if not trainer.is_global_zero:
            self.disable()

    # Training

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start to draw, with the first batch at the latest: a resumed epoch has no start."""
        if self._opened(pl_module) is not None:
            self._is_fitting = True
            self._next_redraw = -math.inf
            self._next_line = monotonic() + self.refresh_seconds

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the line of an epoch."""
        display = self._display
        if display is None:
            return
        has_left_line = self._keep_epoch(display)
        self._train_batch_idx = -1
        self._epoch_track = Track(self.train_description, self.total_train_batches, monotonic())
        self._draw_change(display, at_once=has_left_line)
        if not self._is_first_batch_done:
            self._next_redraw = -math.inf

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Redraw if it is due."""
        self._train_batch_idx = batch_idx
        if monotonic() >= self._next_redraw:
            self._draw_training()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop the clock. The line is finished later, when all values of the epoch are logged."""
        if self._epoch_track is not None:
            self._update_tracks()
            self._epoch_track.finish(monotonic())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the line of the last epoch."""
        display = self._display
        if display is None:
            return
        has_left_line = self._keep_epoch(display)
        if not has_left_line and self._epoch_track is not None:
            self._draw(display, stays=True)
        self._close(keep=not has_left_line)

    # Evaluation and prediction, as runs and inside an epoch

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin a line, below that of the epoch if there is one."""
        if trainer.sanity_checking:
            self._begin_evaluation(pl_module, self.sanity_check_description, trainer.num_sanity_val_batches)
        else:
            self._begin_evaluation(pl_module, self.validation_description, trainer.num_val_batches)

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin a line."""
        self._begin_evaluation(pl_module, self.test_description, trainer.num_test_batches)

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin a line."""
        self._begin_evaluation(pl_module, self.predict_description, trainer.num_predict_batches)

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Redraw if it is due."""
        display = self._display
        if display is None:
            return
        self._evaluation_batch_idx = batch_idx
        if dataloader_idx != self._loader_index:
            # The first batch of another loader is done.
            now = monotonic()
            self._begin_loader(dataloader_idx, now).skip(batch_idx + 1, now)
        if monotonic() >= self._next_redraw:
            self._draw(display)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Return to the line of the epoch, or leave the line of a run of validation."""
        display = self._display
        if display is None:
            return
        if not self._is_fitting and not trainer.sanity_checking:
            self._leave_evaluation()
            return
        # After a sanity check the display stays for the training: a notebook would keep the widget of a closed one.
        self._evaluation_track = None
        if self._epoch_track is not None:
            self._epoch_track.resume(monotonic())
            self._draw_change(display)

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the line."""
        self._leave_evaluation()

    on_predict_end = on_test_end

    def _leave_evaluation(self) -> None:
        """Draw the last line of a run that evaluates, and release the terminal."""
        if self._display is not None and self._evaluation_track is not None:
            self._update_tracks()
            self._evaluation_track.finish(monotonic())
            self._draw(self._display, stays=True)
        self._close(keep=True)

    # End and failure

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Release the terminal; the line stays as it is."""
        self._close(keep=True)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Release the terminal."""
        self._close(keep=True)

    # Drawing

    def _opened(self, module: Any) -> Display | None:
        """Return the display, a new one if there is none; None if the bar is disabled."""
        if self._enabled and self._display is None:
            self._forget_run()
            display = Display(rich.get_console())
            self._display = display
            self._module = module
            self._layout = Layout(ascii_only=display.ascii_only)
            self._next_redraw = monotonic() + self._interval(display)
        return self._display

    def _close(self, *, keep: bool) -> None:
        """Release the terminal, and leave the last lines on it or not."""
        display = self._display
        self._forget_run()
        if display is not None:
            display.close(keep=keep)

    def _interval(self, display: Display) -> float:
        if display.animated:
            return self.refresh_seconds
        return self.plain_seconds

    def _begin_evaluation(self, module: Any, label: str, totals: float | list[float]) -> None:
        """Begin the line of an evaluation.

        Args:
            module: The user's module.
            label: Text at the start of the line.
            totals: The number of batches of each loader.
        """
        display = self._opened(module)
        if display is None:
            return
        now = monotonic()
        self._evaluation_batch_idx = -1
        if self._epoch_track is not None:
            self._update_tracks()
            self._epoch_track.pause(now)
        self._evaluation_label = label
        # A trainer may report one number instead of a list.
        self._loader_totals = totals if isinstance(totals, list) else [totals]
        self._begin_loader(0, now)
        self._draw_change(display)

    def _begin_loader(self, loader: int, now: float) -> Track:
        """Begin the line of a loader of the evaluation."""
        label = self._evaluation_label
        num_loaders = len(self._loader_totals)
        if num_loaders > 1:
            label += f" {loader + 1}/{num_loaders}"
        # The columns of a validation stand below those of its epoch.
        if self._epoch_track is not None:
            label = label.ljust(len(self._epoch_track.label))
        track = Track(label, self._loader_totals[loader], now)
        self._loader_index = loader
        self._evaluation_track = track
        return track

    def _keep_epoch(self, display: Display) -> bool:
        """Write the line of an epoch that has ended, if such lines stay; return True if it was written."""
        epoch = self._epoch_track
        if epoch is None or not epoch.finished:
            return False
        now = monotonic()
        leaves = now >= self._next_line if self.leave is None else self.leave
        if display.animated and not leaves:
            return False
        self._next_line = now + self.refresh_seconds
        metrics = self._read_metrics(wait=True)
        if display.animated:
            display.write_lines(self._layout.compose([epoch], metrics, width=display.console.width, now=now))
        else:
            display.write(plain_line(epoch, metrics, now=now) + "\n")
        self._epoch_track = None
        self._evaluation_track = None
        return True

    def _draw_training(self) -> None:
        """Redraw in the course of an epoch."""
        display = self._display
        if display is None:
            return
        if not self._is_first_batch_done:
            self._is_first_batch_done = True
            if self._epoch_track is None or self._train_batch_idx > 0:
                self._epoch_track = self._resumed_epoch()
            # The first plain line is written after one interval.
            if not display.animated:
                self._next_redraw = monotonic() + self.plain_seconds
                return
        self._draw(display)

    def _resumed_epoch(self) -> Track:
        """Return the track of an epoch whose batches before this run have no part in the rate."""
        done = self._train_batch_idx + 1
        batches = float(self.trainer.num_training_batches)
        total = min(batches, self.total_train_batches + done)
        now = monotonic()
        epoch = Track(self.train_description, total, now)
        epoch.skip(done, now)
        return epoch

    def _draw_change(self, display: Display, *, at_once: bool = False) -> None:
        """Draw the start or end of a stage, as the next batch may take long. Where epochs are short, most changes wait.

        Args:
            display: The display.
            at_once: Draw it even if there were many changes within the interval. Default: False.
        """
        if not display.animated:
            return
        now = monotonic()
        changes = self._drawn_changes
        are_many = len(changes) == _MOST_IMMEDIATE and now - changes[0] < self.refresh_seconds
        if at_once or not are_many:
            changes.append(now)
            self._draw(display)

    def _draw(self, display: Display, *, stays: bool = False) -> None:
        """Draw the tracks, outermost first; on a display that is not animated the innermost alone.

        Args:
            display: The display.
            stays: The lines are the last ones. Default: False.
        """
        self._update_tracks()
        metrics = self._read_metrics(wait=stays)
        now = monotonic()
        tracks = [track for track in (self._epoch_track, self._evaluation_track) if track is not None]
        if display.animated:
            display.show(self._layout.compose(tracks, metrics, width=display.console.width, now=now))
        else:
            display.write(plain_line(tracks[-1], metrics, now=now) + "\n")
        self._next_redraw = now + self._interval(display)

    def _update_tracks(self) -> None:
        """Count the batches that are done."""
        now = monotonic()
        if self._epoch_track is not None:
            self._epoch_track.update(self._train_batch_idx + 1, now)
        if self._evaluation_track is not None:
            self._evaluation_track.update(self._evaluation_batch_idx + 1, now)

    def _read_metrics(self, *, wait: bool) -> dict[str, Any]:
        """Return the values after the bar; with `wait`, those of this moment."""
        # `get_metrics`, which a subclass may override, has Lightning's arguments.
        self._wait_for_values = wait
        metrics = dict(self.get_metrics(self.trainer, self._module))
        for callback in self.trainer.callbacks:
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
