"""RunSummary: the callback that prints a table after a fit."""

from time import monotonic
from typing import Any

import rich
from lightning.pytorch.utilities.exceptions import SIGTERMException
from rich import box
from rich.table import Table
from rich.text import Text

from equipoise.extensions.report.curve_history import step_counts, steps_done
from equipoise.extensions.report.fit_recorder import Fit, FitRecorder
from equipoise.extensions.report.read_trainer import best_scores, device_name, devices_of, peaks_of, saved_checkpoints
from equipoise.formats import format_bytes, format_duration, format_number
from equipoise.tables.whole_table import print_table

__all__ = ["RunSummary"]

# Widest column of values.
_VALUES = 44
# Name and value of a row of the table.
Row = tuple[str, str]


class RunSummary(FitRecorder):
    """Print a table when a fit ends, and record its learning curves.

    The table holds the metrics of the last epoch, the best checkpoint, samples per second, times, devices and peak
    memory. The table of an interrupted fit holds the values up to then. A `RunReport` draws the curves. They are part
    of a checkpoint, so those of a resumed fit are complete.

    A value that is logged for steps only appears in the table as it was in the last step, where its curve in the report
    ends, too; log it with `on_epoch=True` to see the mean. Reading the values for the table waits for the device once
    an epoch.

    Args:
        table: Print the table. Default: True.

    Attributes:
        recorded: The recorded curves, also for a `RunReport`.

    Example:
        >>> from equipoise import RunSummary, Trainer
        >>> Trainer(max_epochs=3, callbacks=[RunSummary()]).fit(model, datamodule=data)  # doctest: +SKIP
    """

    def __init__(self, *, table: bool = True) -> None:
        super().__init__()
        self.table = table

    @property
    def history(self) -> dict[str, dict[float, float]]:
        """Curves: for every metric's name its values, by epochs done."""
        return self.recorded.curves

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
        fit.throughput.pause(monotonic())
        self.recorded.on_exception(trainer)
        outcome = f"stopped by {type(exception).__name__}"
        if isinstance(exception, KeyboardInterrupt):
            outcome = "interrupted"
        if isinstance(exception, SIGTERMException):
            outcome = "ended by SIGTERM"
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
        for kind, path in saved_checkpoints(trainer):
            console.print(Text.assemble((f"{kind.capitalize()}: ", "dim"), path), soft_wrap=True)

    def _make_table(self, trainer: Any, fit: Fit, outcome: str) -> Table:
        table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
        table.add_column(f"Fit {outcome}", overflow="fold")
        # A long value must not move the others away from their names.
        table.add_column("", justify="right", overflow="fold", max_width=_VALUES)
        for rows in (self._metric_rows(trainer), _run_rows(trainer, fit), _machine_rows(trainer)):
            # A line below a section without rows would look like a mistake.
            if not rows:
                continue
            for name, value in rows:
                table.add_row(Text(name, "dim"), Text(value))
            table.add_section()
        return table

    def _metric_rows(self, trainer: Any) -> list[Row]:
        """Return the last value of each metric, those of validation last, then the best scores."""
        validation_names = self.recorded.validation_names
        values = self.recorded.last_values()
        names = sorted(values, key=lambda name: name in validation_names)
        rows = [(name, format_number(values[name])) for name in names]
        rows += [(name, format_number(score)) for name, score in best_scores(trainer)]
        return rows


def _run_rows(trainer: Any, fit: Fit) -> list[Row]:
    """Return the rows about progress and speed."""
    first_epoch = fit.first_epoch or 0
    epochs = f"{first_epoch + fit.epochs:,}"
    counts = {name: f"{steps:,}" for name, steps in step_counts(trainer).items()}
    if first_epoch:
        epochs += f" ({fit.epochs:,} in this run)"
    # A run may go on within the first epoch.
    if fit.first_step:
        counts["steps"] += f" ({steps_done(trainer) - fit.first_step:,} in this run)"
    rows = [("epochs", epochs), *counts.items()]
    if fit.speed:
        rows.append((fit.speed_unit, f"{fit.speed:,.0f}"))
    if fit.epochs:
        rows.append(("time per epoch", format_duration(fit.epoch_time / fit.epochs)))
    rows.append(("total time", format_duration(monotonic() - fit.clock)))
    # Lightning's Trainer has no `summary_rows`.
    rows += getattr(trainer, "summary_rows", {}).items()
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
