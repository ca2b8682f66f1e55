"""RunSummary: the callback that prints a table and saves learning curves after a fit."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import rich
import torch
from rich import box
from rich.table import Table
from rich.text import Text

from equipoise.callbacks.callback import Callback
from equipoise.callbacks.progress.display import format_value
from equipoise.errors import ConfigurationError
from equipoise.memory.devices import format_bytes, peak_of_process
from equipoise.report.curve_history import CurveHistory
from equipoise.report.facts import (
    checkpoint_callbacks,
    device_name,
    devices_of,
    format_duration,
    shorten,
    size_function,
)
from equipoise.report.learning_curves import can_draw, draw_curves

__all__ = ["RunSummary"]


@dataclass(kw_only=True)
class _Fit:
    """What is counted in one fit. All times are seconds.

    Attributes:
        trainer: Whose fit it is.
        folder: Where the picture goes.
        started: When it began; `first_epoch`, `first_step`: where, if any training took place.
        epochs: Finished epochs; `epoch_time`: what they took, validation included.
        samples: Samples trained on; `countless`: a batch's size could not be told.
        training_time: Time in training epochs, validation excluded.
        epoch_started, validation_started: When the present one began, if there is one.
        validation_time: Time in validation since the epoch began.
        alone: The counts are those of this process alone, though there are others.
    """

    trainer: Any
    folder: Path
    started: float
    size_of: Callable[[Any], int | None]
    first_epoch: int | None = None
    first_step: int = 0
    epochs: int = 0
    epoch_time: float = 0.0
    samples: int = 0
    countless: bool = False
    training_time: float = 0.0
    epoch_started: float | None = None
    validation_started: float | None = None
    validation_time: float = 0.0
    alone: bool = False


class RunSummary(Callback):
    """Prints a table when a fit ends, and draws its learning curves into `curves.png`.

    The table holds the metrics of the last epoch, the best checkpoint, samples per second, times, devices and peak
    memory. An interrupted fit gets what there is. The picture lies in the folder of the first logger, else in
    `default_root_dir`; it needs matplotlib (`pip install 'equipoise[plots]'`). The curves are part of a checkpoint, so
    those of a resumed fit are whole. A `fast_dev_run` writes no file.

    In the table, a value that is logged for steps only stands as it was in the epoch's last step; log it with
    `on_epoch=True` to see the mean. The picture goes by step: it shows what loggers are handed, also if there is no
    logger. Reading the values for the table waits for the device once an epoch.

    Args:
        curves: Whether to draw the picture. Default: True.
        table: Whether to print the table. Default: True.

    Example:
        >>> from equipoise import RunSummary, Trainer
        >>> Trainer(max_epochs=3, callbacks=[RunSummary()]).fit(model, datamodule=data)  # doctest: +SKIP
    """

    uses_outputs = False

    def __init__(self, *, curves: bool = True, table: bool = True) -> None:
        self.curves = curves
        self.table = table
        self.recorded = CurveHistory()
        self._fit: _Fit | None = None

    @property
    def history(self) -> dict[str, dict[float, float]]:
        """The curves: for every metric's name its values, by epochs done."""
        return self.recorded.curves

    def __getstate__(self) -> dict[str, Any]:
        """The curves and the options; neither a fit under way nor the methods that Lightning lends to callbacks."""
        return {**{k: v for k, v in vars(self).items() if k not in ("log", "log_dict")}, "_fit": None}

    def state_dict(self) -> dict[str, Any]:
        """The curves so far."""
        if self._fit is not None:  # the checkpoint of an epoch's end is written when its values are known
            self.recorded.take_epoch(self._fit.trainer)
        return self.recorded.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on with the curves of an earlier process."""
        self.recorded.load_state_dict(state_dict)

    # What is counted.

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Starts the clock."""
        # log_dir is agreed upon by all processes, so it is asked for while all are here.
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        size_of = size_function(trainer, pl_module)
        self._fit = _Fit(trainer=trainer, folder=folder, started=monotonic(), size_of=size_of)
        self.recorded.on_fit_start(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Drops what an earlier fit recorded beyond the point where this one begins."""
        if (fit := self._fit) is not None:
            fit.first_epoch, fit.first_step = trainer.current_epoch, trainer.global_step
            fit.epoch_started = monotonic()  # an epoch that is resumed in its middle does not start again
            self.recorded.on_train_start(trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Starts the epoch's clock."""
        if (fit := self._fit) is not None:
            self.recorded.on_train_epoch_start(trainer)
            fit.validation_time, fit.epoch_started = 0.0, monotonic()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Counts the samples."""
        self.recorded.batches_done = batch_idx + 1
        if (fit := self._fit) is not None:
            size = fit.size_of(batch)
            if size is None:
                fit.countless = True
            else:
                fit.samples += size

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Notes which metrics are known: those that validation adds are its own."""
        if (fit := self._fit) is not None and not trainer.sanity_checking:
            fit.validation_started = monotonic()
            self.recorded.on_validation_start(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Takes the values of a validation, at the fraction of the epoch that is done."""
        if (fit := self._fit) is None or fit.validation_started is None or trainer.sanity_checking:
            return
        fit.validation_time += monotonic() - fit.validation_started
        fit.validation_started = None
        self.recorded.on_validation_end(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Stops the epoch's clock. Its values are taken later: the module may log more after this."""
        if (fit := self._fit) is not None and fit.epoch_started is not None:
            fit.epoch_time += monotonic() - fit.epoch_started
            fit.epochs += 1
            self.recorded.on_train_epoch_end(trainer)
            self._stop_epoch(fit)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Takes the last values, and the samples of all processes."""
        if (fit := self._fit) is None:
            return
        self.recorded.take_epoch(trainer)
        if trainer.world_size > 1:
            counts = torch.tensor([fit.samples, fit.countless], device=trainer.strategy.root_device)
            samples, countless = trainer.strategy.reduce(counts, reduce_op="sum").tolist()
            fit.samples, fit.countless = samples, bool(countless)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Prints the table and draws the picture."""
        self.recorded.leave(trainer)
        self._conclude(trainer, "finished")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Does the same for what there is, if training had begun."""
        if (fit := self._fit) is None or fit.first_epoch is None:
            self.recorded.leave(trainer)
            self._fit = None
            return
        if fit.epoch_started is not None:
            self._stop_epoch(fit)
        fit.alone = trainer.world_size > 1
        self.recorded.on_exception(trainer)
        interrupted = isinstance(exception, KeyboardInterrupt)
        self._conclude(trainer, "interrupted" if interrupted else f"stopped by {type(exception).__name__}")

    def _stop_epoch(self, fit: _Fit) -> None:
        """Adds up the training time of an epoch, whole or not."""
        now = monotonic()
        assert fit.epoch_started is not None
        if fit.validation_started is not None:  # interrupted there
            fit.validation_time += now - fit.validation_started
        fit.training_time += now - fit.epoch_started - fit.validation_time
        fit.epoch_started = fit.validation_started = None

    # What is made of it.

    def _conclude(self, trainer: Any, how: str) -> None:
        fit, self._fit = self._fit, None
        if fit is None or not trainer.is_global_zero:
            return
        console = rich.get_console()
        if self.table:
            console.print(self._make_table(trainer, fit, how))
        for line in self._checkpoint_lines(trainer) if self.table else ():
            console.print(line, soft_wrap=True)
        if self.curves and not trainer.fast_dev_run and self.recorded.step_curves():
            console.print(self._draw(fit.folder / "curves.png"), soft_wrap=True)

    def _make_table(self, trainer: Any, fit: _Fit, how: str) -> Table:
        table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
        table.add_column(f"Fit {how}", overflow="fold")
        table.add_column("", justify="right", overflow="fold")
        sections = (self._metric_rows(trainer), _run_rows(trainer, fit), _machine_rows(trainer))
        for rows in filter(None, sections):
            for name, value in rows:
                table.add_row(Text(name, "dim"), Text(value))
            table.add_section()
        return table

    def _metric_rows(self, trainer: Any) -> list[tuple[str, str]]:
        names = sorted(self.history, key=lambda name: name in self.recorded.validation_names)
        rows = [(name, format_value(curve[max(curve)])) for name in names if (curve := self.history[name])]
        for callback in checkpoint_callbacks(trainer):
            if callback.monitor and callback.best_model_score is not None:
                rows.append((f"best {callback.monitor}", format_value(float(callback.best_model_score))))
        return rows

    def _checkpoint_lines(self, trainer: Any) -> list[Text]:
        """Paths stand outside of the table, so that they are not cut."""
        lines = []
        for callback in checkpoint_callbacks(trainer):
            if callback.best_model_path:
                kind = "Best checkpoint" if callback.monitor else "Checkpoint"
                lines.append(Text.assemble((f"{kind}: ", "dim"), shorten(callback.best_model_path)))
        return lines

    def _draw(self, path: Path) -> Text:
        """Draws the picture and returns the line that says where it is, or why there is none."""
        if not can_draw():
            return Text("Learning curves need matplotlib: pip install 'equipoise[plots]'", "dim")
        try:
            draw_curves(self.recorded.step_curves(), path, epoch_ends=self.recorded.epoch_ends())
        except OSError as error:  # a full disk must not hide how the run went
            return Text(f"Learning curves could not be written: {error}", "red")
        return Text.assemble(("Learning curves: ", "dim"), shorten(str(path)))


def _run_rows(trainer: Any, fit: _Fit) -> list[tuple[str, str]]:
    """What was done, and how fast."""
    first_epoch = fit.first_epoch or 0
    epochs, steps = f"{first_epoch + fit.epochs:,}", f"{trainer.global_step:,}"
    if first_epoch:
        epochs += f" ({fit.epochs:,} in this run)"
        steps += f" ({trainer.global_step - fit.first_step:,} in this run)"
    rows = [("epochs", epochs), ("steps", steps)]
    if fit.samples and fit.training_time > 0 and not fit.countless:
        kind = "samples per second" + (" (this process)" if fit.alone else "")
        rows.append((kind, f"{fit.samples / fit.training_time:,.0f}"))
    if fit.epochs:
        rows.append(("time per epoch", format_duration(fit.epoch_time / fit.epochs)))
    return [*rows, ("total time", format_duration(monotonic() - fit.started))]


def _machine_rows(trainer: Any) -> list[tuple[str, str]]:
    """Where it ran, and the memory it took."""
    rows = [("processes", str(trainer.world_size))] if trainer.world_size > 1 else []
    devices = devices_of(trainer)
    for device in devices:
        which = f" {device}" if len(devices) > 1 else ""
        rows.append((f"device{which}", device_name(device)))
        with contextlib.suppress(ConfigurationError):  # a kind of device that has no readings
            if (peak := peak_of_process(device)) is not None:
                rows.append((f"peak memory{which}", format_bytes(peak)))
    return rows
