"""ProgressBar: redrawn by the clock, never in each step, and without waiting for a device.

Most batches cost one look at the clock. When a redraw is due, the tracks are brought up to date and drawn:

    fit         Epoch 3/10  ━━━━━━━╸────────────  412/1095  38.2 it/s  0:11<0:18  loss 0.3124
                Validation  ━━━━━━━━━━━━━━━╸────  31/40  91.0 it/s  0:00<0:00
    validate, test, predict, and the sanity check: one line
"""

import math
from collections import deque
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import rich
from lightning.pytorch.callbacks import ProgressBar as _LightningProgressBar

from equipoise.callbacks.progress.display import Layout, plain_line
from equipoise.callbacks.progress.latest_values import LatestValues
from equipoise.callbacks.progress.live_display import Display
from equipoise.callbacks.progress.track import Track
from equipoise.errors import ConfigurationError

__all__ = ["ProgressBar"]


@dataclass(kw_only=True)
class _Drawing:
    """What exists only while there is something to draw.

    Attributes:
        fitting: Whether training has started.
        epoch: The epoch's track.
        evaluation: The track of a validation inside the epoch, or of a stage of its own.
        description, totals: What evaluation tracks are called, and the batches of each loader.
        first: No batch of this fit has been seen: the next one tells where a resumed epoch begins.
        wait: The line to draw stays, so its values must be the last ones.
        changes: When something that began or ended was drawn at once, the last few times.
    """

    trainer: Any
    module: Any
    display: Display
    layout: Layout
    values: LatestValues = field(default_factory=LatestValues)
    fitting: bool = False
    epoch: Track | None = None
    evaluation: Track | None = None
    description: str = ""
    totals: list[float] = field(default_factory=list)
    first: bool = True
    wait: bool = False
    changes: deque[float] = field(default_factory=lambda: deque(maxlen=4))

    @property
    def tracks(self) -> list[Track]:
        """What to draw, outermost first."""
        return [track for track in (self.epoch, self.evaluation) if track is not None]


class ProgressBar(_LightningProgressBar):
    """Shows how far a run has come: epoch, batches, rate, time so far and to come, values logged with `prog_bar=True`.

    On a terminal and in a notebook with ipywidgets it is redrawn in place; elsewhere, in a file, it writes a plain line
    every so often and one at each epoch's end. Epochs are counted from 1. Rates and times are those of training alone,
    or of validation alone. Values on CUDA are at most one redraw old; only a line that stays waits for its own.

    A subclass may override `get_metrics` to choose what is shown, and the descriptions (`train_description`, ...) to
    name it.

    Args:
        refresh_seconds: Seconds between two redraws. Default: 0.2.
        plain_seconds: Seconds between two plain lines. Default: 10.
        leave: Whether every finished epoch leaves its line. Default: False, only the last one stays.

    Raises:
        ConfigurationError: If an interval is not a positive number.

    Example:
        >>> from equipoise import Trainer
        >>> Trainer(callbacks=[ProgressBar(leave=True)]).fit(model, datamodule=data)  # doctest: +SKIP
    """

    uses_outputs = False

    def __init__(self, *, refresh_seconds: float = 0.2, plain_seconds: float = 10.0, leave: bool = False) -> None:
        super().__init__()
        for name, seconds in (("refresh_seconds", refresh_seconds), ("plain_seconds", plain_seconds)):
            if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
                raise ConfigurationError(
                    f"ProgressBar({name}=...) takes a positive number of seconds, but {seconds!r} was given."
                    " To have no bar, say Trainer(enable_progress_bar=False)."
                )
        self.refresh_seconds = refresh_seconds
        self.plain_seconds = plain_seconds
        self.leave = leave
        self._enabled = True
        self._due = math.inf  # when to draw next
        self._train_batch = self._evaluation_batch = -1  # the batches seen last
        self._loader = 0
        self._drawing: _Drawing | None = None
        self._owner: Any = None
        self._source = "progress_bar_metrics"

    def __getstate__(self) -> dict[str, Any]:
        """The bar as it was configured: what it draws, where, and for whom is not copied."""
        lent = ("log", "log_dict")  # the module's own, which Lightning lends to callbacks
        state = {name: value for name, value in vars(self).items() if name not in lent}
        return {**state, "_due": math.inf, "_drawing": None, "_owner": None}

    # What Lightning asks of a bar.

    @property
    def is_enabled(self) -> bool:
        """Whether it draws."""
        return self._enabled

    def enable(self) -> None:
        """Draws again, from the next stage on."""
        self._enabled = True

    def disable(self) -> None:
        """Draws no more, until `enable`."""
        self._enabled = False
        self._close(keep=False)

    def print(
        self, *args: Any, sep: str | None = " ", end: str | None = "\n", file: Any = None, flush: bool = False
    ) -> None:
        """Prints as Python's `print` does, above the bar while there is one."""
        drawing = self._drawing
        if drawing is None or file is not None or not drawing.display.animated:
            print(*args, sep=sep, end=end, file=file, flush=flush)
        else:
            text = (" " if sep is None else sep).join(map(str, args))
            drawing.display.write(text + ("\n" if end is None else end))

    @property
    def trainer(self) -> Any:
        """The trainer it was set up for last.

        Raises:
            TypeError: If there was none yet.
        """
        if self._owner is None:
            raise TypeError(
                "ProgressBar.trainer is known from the hook `setup` on, but no run has begun. Read it in a hook."
            )
        return self._owner

    @property
    def train_description(self) -> str:
        """What stands in front of an epoch's line."""
        epoch, last = self.trainer.current_epoch + 1, self.trainer.max_epochs
        return f"Epoch {epoch}" if last is None or last < 0 else f"Epoch {epoch:>{len(str(last))}}/{last}"

    @property
    def total_train_batches(self) -> float:
        """The batches of an epoch that begins now, up to `max_steps`; infinite if unknown."""
        trainer, batches = self.trainer, math.inf
        if trainer.max_steps is not None and trainer.max_steps > 0:
            batches = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
        return min(float(trainer.num_training_batches), batches)

    def get_metrics(self, trainer: Any, pl_module: Any) -> dict[str, Any]:
        """What is shown behind the bar, by name: by default what was logged with `prog_bar=True`.

        Called when a redraw is due. Override it to add or to drop something.
        """
        drawing = self._drawing
        values = LatestValues() if drawing is None else drawing.values
        return values.read(getattr(trainer, self._source), wait=drawing is None or drawing.wait)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Takes note of the trainer. Only the main process draws."""
        self._owner = trainer
        # Reading progress_bar_metrics waits for the device; a trainer that can do better offers progress_bar_values.
        self._source = "progress_bar_values" if "progress_bar_values" in dir(trainer) else "progress_bar_metrics"
        if not trainer.is_global_zero:
            self.disable()

    # Training.

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begins to draw, if only after the first batch: an epoch that is resumed does not start."""
        if (drawing := self._open(trainer, pl_module)) is not None:
            drawing.fitting, self._due = True, -math.inf

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Begins a new line."""
        if (drawing := self._drawing) is None:
            return
        kept = self._keep_epoch(drawing)
        self._train_batch = -1
        drawing.epoch = Track(self.train_description, self.total_train_batches, monotonic())
        self._draw_change(drawing, at_once=kept)
        if drawing.first:
            self._due = -math.inf

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Redraws if it is time."""
        self._train_batch = batch_idx
        if monotonic() >= self._due:
            self._draw_training()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Stops the clock. The line is finished later, once all that belongs to the epoch has been logged."""
        if (drawing := self._drawing) is not None and drawing.epoch is not None:
            self._update(drawing)
            drawing.epoch.finish(monotonic())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leaves the last line."""
        if (drawing := self._drawing) is not None:
            kept = self._keep_epoch(drawing)
            if not kept and drawing.epoch is not None:
                self._draw(drawing, stays=True)
            self._close(keep=not kept)

    # Evaluation and prediction, of their own or inside an epoch.

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Begins a line, below the epoch's if there is one."""
        if trainer.sanity_checking:
            self._begin_evaluation(trainer, pl_module, self.sanity_check_description, trainer.num_sanity_val_batches)
        else:
            self._begin_evaluation(trainer, pl_module, self.validation_description, trainer.num_val_batches)

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Begins a line."""
        self._begin_evaluation(trainer, pl_module, self.test_description, trainer.num_test_batches)

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """Begins a line."""
        self._begin_evaluation(trainer, pl_module, self.predict_description, trainer.num_predict_batches)

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Redraws if it is time."""
        self._evaluation_batch = batch_idx
        if dataloader_idx != self._loader:
            self._change_loader(dataloader_idx)
        if monotonic() >= self._due and self._drawing is not None:
            self._draw(self._drawing)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Goes back to the epoch's line, or leaves the finished one."""
        if (drawing := self._drawing) is None:
            return
        if not drawing.fitting and not trainer.sanity_checking:
            self._end_evaluation(drawing, keep=True)
            return
        # After a sanity check the display stays for the training: a notebook would keep the widget of a closed one.
        drawing.evaluation = None
        if drawing.epoch is not None:
            drawing.epoch.go_on(monotonic())
            self._draw_change(drawing)

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        """Leaves the finished line."""
        if self._drawing is not None:
            self._end_evaluation(self._drawing, keep=True)

    on_predict_end = on_test_end

    # The end, good or bad.

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Gives the terminal back; the line stays as it is."""
        self._close(keep=True)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Gives the terminal back."""
        self._close(keep=True)

    # How it draws.

    def _open(self, trainer: Any, module: Any) -> _Drawing | None:
        """Begins to draw, if it is enabled and does not draw already."""
        if self._enabled and self._drawing is None:
            display = Display(rich.get_console())
            layout = Layout(ascii_only=display.ascii_only)
            self._drawing = _Drawing(trainer=trainer, module=module, display=display, layout=layout)
            self._due = monotonic() + self._interval(self._drawing)
        return self._drawing

    def _close(self, *, keep: bool) -> None:
        drawing, self._drawing, self._due = self._drawing, None, math.inf
        if drawing is not None:
            drawing.display.close(keep=keep)

    def _interval(self, drawing: _Drawing) -> float:
        return self.refresh_seconds if drawing.display.animated else self.plain_seconds

    def _begin_evaluation(self, trainer: Any, module: Any, description: str, totals: float | list[float]) -> None:
        if (drawing := self._open(trainer, module)) is None:
            return
        now = monotonic()
        if drawing.epoch is not None:
            self._update(drawing)
            drawing.epoch.pause(now)
        drawing.description, drawing.totals = description, list(totals) if isinstance(totals, list) else [totals]
        self._loader, self._evaluation_batch = 0, -1
        drawing.evaluation = Track(self._evaluation_label(drawing), drawing.totals[0], now)
        self._draw_change(drawing)

    def _evaluation_label(self, drawing: _Drawing) -> str:
        loaders = len(drawing.totals)
        label = drawing.description if loaders == 1 else f"{drawing.description} {self._loader + 1}/{loaders}"
        return label if drawing.epoch is None else label.ljust(len(drawing.epoch.label))

    def _change_loader(self, dataloader_idx: int) -> None:
        """The first batch of another loader is done."""
        self._loader = dataloader_idx
        if (drawing := self._drawing) is not None:
            now = monotonic()
            drawing.evaluation = Track(self._evaluation_label(drawing), drawing.totals[dataloader_idx], now)
            drawing.evaluation.skip(self._evaluation_batch + 1, now)

    def _end_evaluation(self, drawing: _Drawing, *, keep: bool) -> None:
        if drawing.evaluation is not None and keep:
            self._update(drawing)
            drawing.evaluation.finish(monotonic())
            self._draw(drawing, stays=True)
        self._close(keep=keep)

    def _keep_epoch(self, drawing: _Drawing) -> bool:
        """Writes the line of an epoch that has ended, where such lines stay; says whether it did."""
        epoch = drawing.epoch
        if epoch is None or not epoch.finished or (drawing.display.animated and not self.leave):
            return False
        drawing.evaluation = None
        metrics, now = self._metrics(drawing, wait=True), monotonic()
        if drawing.display.animated:
            drawing.display.keep(drawing.layout.compose([epoch], metrics, width=drawing.display.console.width, now=now))
        else:
            drawing.display.write(f"{plain_line(epoch, metrics, now=now)}\n")
        drawing.epoch = None
        return True

    def _draw_training(self) -> None:
        """Redraws in the middle of an epoch."""
        if (drawing := self._drawing) is None:
            return
        if drawing.first:
            self._see_first_batch(drawing)
            if not drawing.display.animated:
                self._due = monotonic() + self.plain_seconds
                return
        self._draw(drawing)

    def _see_first_batch(self, drawing: _Drawing) -> None:
        """The first batch of a fit tells whether its epoch is resumed: the batches before it were not done now."""
        drawing.first = False
        if drawing.epoch is None or self._train_batch > 0:
            done, now = self._train_batch + 1, monotonic()
            total = min(float(self.trainer.num_training_batches), self.total_train_batches + done)
            drawing.epoch = Track(self.train_description, total, now)
            drawing.epoch.skip(done, now)

    def _draw_change(self, drawing: _Drawing, *, at_once: bool = False) -> None:
        """Draws what has just begun or ended: the next batch may take long. Where epochs are short, not all of it."""
        changes, now = drawing.changes, monotonic()
        calm = len(changes) < 4 or now - changes[0] >= self.refresh_seconds
        if drawing.display.animated and (calm or at_once):
            changes.append(now)
            self._draw(drawing)

    def _draw(self, drawing: _Drawing, *, stays: bool = False) -> None:
        """Draws now.

        Args:
            drawing: What.
            stays: Whether the line is its last. Default: False.
        """
        self._update(drawing)
        metrics, now = self._metrics(drawing, wait=stays), monotonic()
        if drawing.display.animated:
            drawing.display.show(
                drawing.layout.compose(drawing.tracks, metrics, width=drawing.display.console.width, now=now)
            )
        else:
            drawing.display.write(f"{plain_line(drawing.tracks[-1], metrics, now=now)}\n")
        self._due = now + self._interval(drawing)

    def _update(self, drawing: _Drawing) -> None:
        now = monotonic()
        if drawing.epoch is not None:
            drawing.epoch.update(self._train_batch + 1, now)
        if drawing.evaluation is not None:
            drawing.evaluation.update(self._evaluation_batch + 1, now)

    def _metrics(self, drawing: _Drawing, *, wait: bool) -> dict[str, Any]:
        drawing.wait = wait
        return self.get_metrics(drawing.trainer, drawing.module)
