"""RunSummary: the callback that prints a table after a fit."""

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any

import rich
import torch
from rich import box
from rich.table import Table
from rich.text import Text

from equipoise.callbacks.callback import Callback
from equipoise.callbacks.copied_state import copied_state
from equipoise.extensions.report.curve_history import CurveHistory
from equipoise.extensions.report.facts import (
    checkpoint_callbacks,
    device_name,
    devices_of,
    peaks_of,
    size_function,
)
from equipoise.formats import format_bytes, format_duration, format_number, format_path
from equipoise.notices import rank_zero_warn
from equipoise.tables.whole_table import print_table

__all__ = ["RunSummary"]

# Name and value of a row of the table.
Row = tuple[str, str]


@dataclass(kw_only=True)
class _Fit:
    """Counts and times of one fit. All times are seconds.

    Attributes:
        trainer: The trainer of the fit.
        started: Time of the begin.
        size_of: Returns the number of samples of a batch, None if unknown.
        first_epoch: First epoch of this fit; None before training.
        first_step: First step of this fit.
        epochs: Number of finished epochs.
        epoch_time: Time in finished epochs, validation included.
        samples: Number of samples trained on.
        has_unknown_size: True if the size of a batch was unknown.
        training_time: Time in training epochs, validation excluded.
        epoch_started: Time of the present epoch's begin; None between epochs.
        validation_started: Time of the present validation's begin; None between validations.
        validation_time: Time in validation since the epoch began.
        counts_one_process: True if the counts are those of this process alone, though there are others.
    """

    trainer: Any
    started: float
    size_of: Callable[[Any], int | None]
    first_epoch: int | None = None
    first_step: int = 0
    epochs: int = 0
    epoch_time: float = 0.0
    samples: int = 0
    has_unknown_size: bool = False
    training_time: float = 0.0
    epoch_started: float | None = None
    validation_started: float | None = None
    validation_time: float = 0.0
    counts_one_process: bool = False

    def begin_training(self) -> None:
        """Note the point where training begins."""
        self.first_epoch = self.trainer.current_epoch
        self.first_step = self.trainer.global_step
        # An epoch that is resumed in its middle does not start again.
        self.epoch_started = monotonic()

    def begin_epoch(self) -> None:
        """Start the clock of an epoch."""
        self.validation_time = 0.0
        self.epoch_started = monotonic()

    def begin_validation(self) -> None:
        """Start the clock of a validation."""
        self.validation_started = monotonic()

    def end_validation(self) -> None:
        """Add the time of a validation, if one is under way."""
        if self.validation_started is not None:
            self.validation_time += monotonic() - self.validation_started
            self.validation_started = None

    def end_epoch(self) -> None:
        """Add the time of a finished epoch."""
        if self.epoch_started is not None:
            self.epoch_time += monotonic() - self.epoch_started
            self.epochs += 1
            self.stop_epoch()

    def stop_epoch(self) -> None:
        """Add the training time of an epoch, finished or not."""
        if self.epoch_started is None:
            return
        # The validation was interrupted.
        self.end_validation()
        self.training_time += monotonic() - self.epoch_started - self.validation_time
        self.epoch_started = None

    def interrupt(self) -> None:
        """Stop the clock after a failure. Other processes cannot send their counts any more."""
        self.stop_epoch()
        self.counts_one_process = self.trainer.world_size > 1

    def count_batch(self, batch: Any) -> None:
        """Count the samples of a batch."""
        size = self.size_of(batch)
        if size is None:
            self.has_unknown_size = True
        else:
            self.samples += size

    def count_all_processes(self) -> None:
        """Replace the samples of this process by those of all."""
        strategy = self.trainer.strategy
        counts = torch.tensor([self.samples, self.has_unknown_size], device=strategy.root_device)
        samples, unknown_sizes = strategy.reduce(counts, reduce_op="sum").tolist()
        self.samples = samples
        self.has_unknown_size = bool(unknown_sizes)


class RunSummary(Callback):
    """Print a table when a fit ends, and record its learning curves.

    The table holds the metrics of the last epoch, the best checkpoint, samples per second, times, devices and peak
    memory. The table of an interrupted fit holds the values up to then. A `RunReport` draws the curves. They are part
    of a checkpoint, so those of a resumed fit are complete.

    A value that is logged for steps only appears in the table as it was in the epoch's last step; log it with
    `on_epoch=True` to see the mean. Reading the values for the table waits for the device once an epoch.

    Args:
        table: Print the table. Default: True.
        curves: No effect, for programs from before learning curves were part of `RunReport` alone. Default: None.

    Attributes:
        recorded: The recorded curves, also for a `RunReport`.

    Example:
        >>> from equipoise import RunSummary, Trainer
        >>> Trainer(max_epochs=3, callbacks=[RunSummary()]).fit(model, datamodule=data)  # doctest: +SKIP
    """

    uses_outputs = False

    def __init__(self, *, table: bool = True, curves: bool | None = None) -> None:
        if curves is not None:
            rank_zero_warn(
                "RunSummary(curves=...) has no effect: there is no curves.png any more. Learning curves are in"
                " report.html, which RunReport writes. Leave the argument out; it will be removed in Equipoise 0.3.",
                category=FutureWarning,
            )
        self.table = table
        self.recorded = CurveHistory()
        self._fit: _Fit | None = None

    @property
    def history(self) -> dict[str, dict[float, float]]:
        """Curves: for every metric's name its values, by epochs done."""
        return self.recorded.curves

    def __getstate__(self) -> dict[str, Any]:
        """Return the curves and the options, without a fit under way."""
        return copied_state(self, _fit=None)

    def state_dict(self) -> dict[str, Any]:
        """Return the curves so far."""
        # The trainer writes the checkpoint of an epoch's end when the values of the epoch are final.
        if self._fit is not None:
            self.recorded.take_epoch(self._fit.trainer)
        return self.recorded.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the curves of an earlier process."""
        self.recorded.load_state_dict(state_dict)

    # Counts and times.

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the clock."""
        size_of = size_function(trainer, pl_module)
        self._fit = _Fit(
            trainer=trainer,
            started=monotonic(),
            size_of=size_of,
        )
        self.recorded.on_fit_start(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Drop values that an earlier fit recorded beyond the point where this one begins."""
        if self._fit is not None:
            self._fit.begin_training()
            self.recorded.on_train_start(trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the epoch's clock."""
        if self._fit is not None:
            self.recorded.on_train_epoch_start(trainer)
            self._fit.begin_epoch()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count the samples."""
        self.recorded.batches_done = batch_idx + 1
        if self._fit is not None:
            self._fit.count_batch(batch)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the clock of a validation."""
        if self._fit is not None and not trainer.sanity_checking:
            self._fit.begin_validation()
            self.recorded.on_validation_start(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Record the values of a validation, at the finished fraction of the epoch."""
        fit = self._fit
        if fit is None or fit.validation_started is None or trainer.sanity_checking:
            return
        fit.end_validation()
        self.recorded.on_validation_end(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop the epoch's clock. Its values are read later: the module may log more after this."""
        fit = self._fit
        if fit is not None and fit.epoch_started is not None:
            self.recorded.on_train_epoch_end(trainer)
            fit.end_epoch()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Record the last values, and count the samples of all processes."""
        if self._fit is None:
            return
        self.recorded.take_epoch(trainer)
        if trainer.world_size > 1:
            self._fit.count_all_processes()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Print the table."""
        self.recorded.leave(trainer)
        self._conclude(trainer, "finished")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Print the values up to now, if training had begun."""
        fit = self._fit
        if fit is None or fit.first_epoch is None:
            self.recorded.leave(trainer)
            self._fit = None
            return
        fit.interrupt()
        self.recorded.on_exception(trainer)
        outcome = f"stopped by {type(exception).__name__}"
        if isinstance(exception, KeyboardInterrupt):
            outcome = "interrupted"
        self._conclude(trainer, outcome)

    # Table.

    def _conclude(self, trainer: Any, outcome: str) -> None:
        fit = self._fit
        self._fit = None
        if fit is None or not self.table or not trainer.is_global_zero:
            return
        console = rich.get_console()
        print_table(self._make_table(trainer, fit, outcome), console)
        # Paths stand outside of the table, so that it does not break them.
        for line in _checkpoint_lines(trainer):
            console.print(line, soft_wrap=True)

    def _make_table(self, trainer: Any, fit: _Fit, outcome: str) -> Table:
        table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
        table.add_column(f"Fit {outcome}", overflow="fold")
        table.add_column("", justify="right", overflow="fold")
        sections = (
            self._metric_rows(trainer),
            _run_rows(trainer, fit),
            _machine_rows(trainer),
        )
        for rows in sections:
            # A line below a section without rows would look like a mistake.
            if not rows:
                continue
            for name, value in rows:
                table.add_row(Text(name, "dim"), Text(value))
            table.add_section()
        return table

    def _metric_rows(self, trainer: Any) -> list[Row]:
        """Return the last value of each metric, those of validation last, then the best scores."""
        rows = []
        validation_names = self.recorded.validation_names
        for name in sorted(self.history, key=lambda name: name in validation_names):
            curve = self.history[name]
            if curve:
                last_epoch = max(curve)
                rows.append((name, format_number(curve[last_epoch])))
        for callback in checkpoint_callbacks(trainer):
            if callback.monitor and callback.best_model_score is not None:
                score = float(callback.best_model_score)
                rows.append((f"best {callback.monitor}", format_number(score)))
        return rows


def _checkpoint_lines(trainer: Any) -> list[Text]:
    lines = []
    for callback in checkpoint_callbacks(trainer):
        if callback.best_model_path:
            kind = "Best checkpoint" if callback.monitor else "Checkpoint"
            line = Text.assemble((f"{kind}: ", "dim"), format_path(callback.best_model_path))
            lines.append(line)
    return lines


def _run_rows(trainer: Any, fit: _Fit) -> list[Row]:
    """Return the rows about progress and speed."""
    first_epoch = fit.first_epoch or 0
    epochs = f"{first_epoch + fit.epochs:,}"
    steps = f"{trainer.global_step:,}"
    if first_epoch:
        epochs += f" ({fit.epochs:,} in this run)"
        steps += f" ({trainer.global_step - fit.first_step:,} in this run)"
    rows = [("epochs", epochs), ("steps", steps)]
    # The speed is left out if the size of a batch was unknown.
    if fit.samples and fit.training_time > 0 and not fit.has_unknown_size:
        name = "samples per second"
        if fit.counts_one_process:
            name += " (this process)"
        rows.append((name, f"{fit.samples / fit.training_time:,.0f}"))
    if fit.epochs:
        rows.append(("time per epoch", format_duration(fit.epoch_time / fit.epochs)))
    rows.append(("total time", format_duration(monotonic() - fit.started)))
    return rows


def _machine_rows(trainer: Any) -> list[Row]:
    """Return the rows about devices and memory."""
    rows = []
    if trainer.world_size > 1:
        rows.append(("processes", str(trainer.world_size)))
    devices = devices_of(trainer)
    peaks = peaks_of(trainer)
    for device in devices:
        suffix = ""
        if len(devices) > 1:
            suffix = f" {device}"
        rows.append((f"device{suffix}", device_name(device)))
        if str(device) in peaks:
            rows.append((f"peak memory{suffix}", format_bytes(peaks[str(device)])))
    return rows
