"""RunReport: the callback that writes `report.html`."""

import contextlib
import platform
import traceback
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from itertools import chain
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any

import rich
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.exceptions import SIGTERMException
from rich.text import Text

from equipoise.callbacks.copied_state import copied_state
from equipoise.errors import ConfigurationError
from equipoise.extensions.common.page.page import write_page
from equipoise.extensions.report.added_sections import added_sections
from equipoise.extensions.report.collect_record import collect_facts, collect_record, collect_times
from equipoise.extensions.report.curve_history import CurveHistory, steps_done
from equipoise.extensions.report.fit_recorder import Fit, FitRecorder
from equipoise.extensions.report.page.page import write_report
from equipoise.extensions.report.page.record import Outcome, ReportSection, RunRecord
from equipoise.extensions.report.read_trainer import devices_of
from equipoise.extensions.report.run_file.live_values import LiveValues
from equipoise.extensions.report.run_file.origin import origin_facts, read_origin
from equipoise.extensions.report.run_file.run_file import add_test, write_run_file
from equipoise.extensions.report.run_summary import RunSummary
from equipoise.formats import format_count, format_path
from equipoise.interop.remote.paths import AnyPath, to_path
from equipoise.memory.devices import DeviceInfo, list_devices
from equipoise.names.tracebacks import shortened
from equipoise.notices import rank_zero_warn
from equipoise.parallel.communication.object_exchange import gather_objects

__all__ = ["RunReport"]

# Seconds between two reports of a run under way.
_INTERVAL = 60.0
# Characters at the start of a report that contain its title.
_TITLE_RANGE = 4000


class RunReport(FitRecorder):
    """Write `report.html` when a fit ends: learning curves, throughput, memory, events, devices, configuration.

    The page contains all its parts and opens without a network. A fit that fails leaves one too, with the error. During
    a fit, the report is written at the beginning of an epoch, at most once a minute. It lies in the folder of the first
    logger, else in `default_root_dir`; either may be a URL. A `fast_dev_run` writes none. A report that cannot
    be written does not fail the run: a warning states the reason.

    A later `trainer.test` adds its metrics to the page and to `run.json`.

    Memory over time and the tensors at its peak come from a `MemoryLogger` among the callbacks, out-of-memory events
    from an `OOMRecovery`, the picture of a pipeline's last step from its strategy. Learning curves are shared with a
    `RunSummary` if there is one. Otherwise they are recorded here and are part of checkpoints, so those of a resumed
    fit are complete. They show the values that loggers receive, by step, also without a logger.

    `run.json` beside the page has the state, the curves and times of the run for programs, with the command, versions
    and the commit of the working folder; `equipoise runs` reads it. It is written when training begins, and with each
    page. Between two of them, values are appended to `live.jsonl` when loggers receive them, for `equipoise watch`.

    Example:
        >>> from equipoise import RunReport, Trainer
        >>> Trainer(max_epochs=3, callbacks=[RunReport()]).fit(model, datamodule=data)  # doctest: +SKIP
    """

    def __init__(self) -> None:
        super().__init__()
        # True if a `RunSummary` records the curves.
        self._shares_curves = False
        self._folder: AnyPath = Path()
        self._devices: list[DeviceInfo] = []
        # Time of the last report.
        self._written = 0.0
        self._earlier: Fit | None = None
        # The report of the last fit; None before its end.
        self._record: RunRecord | None = None
        # What was run; None before it is read.
        self._origin: dict[str, Any] | None = None
        # Values since the last `run.json`; None before training, and where they cannot be appended to a file.
        self._live: LiveValues | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the curves, without a fit under way."""
        return copied_state(
            self,
            _fit=None,
            _earlier=None,
            _origin=None,
            _live=None,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the curves so far, unless a `RunSummary` records them."""
        if self._shares_curves:
            return {}
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the curves of an earlier process."""
        if state_dict:
            super().load_state_dict(state_dict)

    # Hooks.

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Choose the folder and the curves, and remove the notes of an earlier failure."""
        if stage not in ("fit", "test"):
            return
        # All processes agree on log_dir, so it is read while all of them run this hook.
        folder = to_path(trainer.log_dir or trainer.default_root_dir)
        if stage == "fit" or folder != self._folder:
            self._record = None
        if stage == "test":
            return
        self._folder = folder
        self._devices = []
        self._origin = None
        self._written = monotonic()
        self._share_curves(trainer)
        super().setup(trainer, pl_module, stage)
        if trainer.is_global_zero:
            _take_notes(self._folder)

    def _share_curves(self, trainer: Any) -> None:
        """Draw the curves of the first `RunSummary`, if there is one."""
        summaries = [callback for callback in trainer.callbacks if isinstance(callback, RunSummary)]
        if summaries:
            # Both callbacks call its methods, which then have no further effect.
            self.recorded = summaries[0].recorded
        elif self._shares_curves:
            self.recorded = CurveHistory()
        self._shares_curves = bool(summaries)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """List the devices."""
        super().on_fit_start(trainer, pl_module)
        self._devices = _list_devices(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Continue an earlier fit, if this one begins at its end."""
        super().on_train_start(trainer, pl_module)
        earlier = self._earlier
        if self._fit is not None and earlier is not None and earlier.last_step == steps_done(trainer) > 0:
            self._fit.continue_from(earlier)
        if self._fit is not None and trainer.is_global_zero and not trainer.fast_dev_run:
            # A folder that cannot be written is told of at the end.
            with contextlib.suppress(Exception):
                self._write_run_file(trainer, pl_module, self._fit, "running")
                self._begin_live(trainer, pl_module, self._fit)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Write a report, if the last one is a minute old."""
        super().on_train_epoch_start(trainer, pl_module)
        if self._fit is not None and monotonic() - self._written >= _INTERVAL:
            self._fit.throughput.pause(monotonic())
            self._write(trainer, pl_module, self._fit, "running")
            self._fit.throughput.begin(monotonic())

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the report."""
        self.recorded.leave(trainer)
        outcome: Outcome = "finished"
        if trainer.received_sigterm:
            outcome = "interrupted"
        self._conclude(trainer, pl_module, outcome)

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        """Add the metrics of a test to the report of the fit before it."""
        if self._record is None or not trainer.is_global_zero or trainer.fast_dev_run:
            return
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        told = {name: format_count(value) for name, value in values.items()}
        # Those of an earlier test are replaced, and come first as well.
        self._record = replace(self._record, facts=told | {**self._record.facts, **told})
        try:
            add_test(self._folder, values)
            write_report(self._record, self._folder / "report.html")
        except Exception as failure:
            _warn_of_failure(failure)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Write a report with the error and the values up to now."""
        if trainer.state.fn != "fit":
            return
        # 1. Wrong input that is refused before training is one message, which needs no report.
        fit = self._fit
        has_begun = fit is not None and fit.first_epoch is not None
        is_refusal = isinstance(exception, (ConfigurationError, MisconfigurationException))
        if is_refusal and not has_begun:
            self.recorded.leave(trainer)
            self._fit = None
            return
        # A fit that failed before `setup` has no counts yet.
        if fit is None:
            self._folder = _folder_of_failure(trainer)
            fit = self._fit = Fit()
        # 2. Record the last values.
        fit.throughput.pause(monotonic())
        self.recorded.on_exception(trainer)
        if isinstance(exception, KeyboardInterrupt | SIGTERMException):
            cause = "" if isinstance(exception, KeyboardInterrupt) else "SIGTERM ended it."
            self._conclude(trainer, pl_module, "interrupted", cause)
            return
        # 3. Write the report. The other processes pass their errors on to the main process.
        error = _trace_of(exception)
        if not trainer.is_global_zero and not _has_report(self._folder / "report.html", fit.started):
            _leave_note(self._folder, trainer.global_rank, error)
        if trainer.is_global_zero and trainer.world_size > 1:
            error += _take_notes(self._folder)
        self._conclude(trainer, pl_module, "failed", error)

    def _begin_live(self, trainer: Any, module: Any, fit: Fit) -> None:
        """Let values be appended to a file from now on."""
        folder = self._folder
        # Objects behind a URL cannot be appended to.
        if not isinstance(folder, Path):
            return

        def write_whole() -> None:
            with contextlib.suppress(Exception):
                self._write_run_file(trainer, module, fit, "running")

        live = LiveValues(folder, fit.clock, write_whole)
        self.recorded.observer = live.add
        self._live = live

    # The report.

    def _conclude(self, trainer: Any, module: Any, outcome: Outcome, error: str = "") -> None:
        fit = self._fit
        self._fit = None
        if fit is None:
            return
        path = self._write(trainer, module, fit, outcome, error)
        # Where the disk is full, the last values are nowhere else.
        if self._live is not None and path is not None:
            self._live.remove()
        self._live = None
        # The trainer is released.
        self._earlier = replace(fit, trainer=None, size_of=None, last_step=steps_done(trainer))
        if path is not None:
            line = Text.assemble(("Report: ", "dim"), format_path(str(path)))
            rich.get_console().print(line, soft_wrap=True)

    def _write(self, trainer: Any, module: Any, fit: Fit, outcome: Outcome, error: str = "") -> AnyPath | None:
        """Write the report in the main process; return its path, None if there is no report."""
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return None
        self._written = monotonic()
        path = self._folder / "report.html"
        try:
            record = collect_record(trainer, module, fit, self.recorded, self._folder)
            sections: Sequence[ReportSection] = ()
            # The report of a run under way is soon replaced.
            if outcome != "running":
                sections = added_sections(trainer, module)
            self._write_run_file(trainer, module, fit, outcome, error)
            origin = origin_facts(self._read_origin(), self._folder)
            record = replace(
                record, origin=origin, outcome=outcome, error=error, devices=self._devices, sections=sections
            )
            write_report(record, path)
        except Exception as failure:
            _warn_of_failure(failure)
            return None
        self._record = record
        return path

    def _read_origin(self) -> dict[str, Any]:
        """Return what was run, which is read once in a fit."""
        if self._origin is None:
            self._origin = read_origin()
        return self._origin

    def _write_run_file(self, trainer: Any, module: Any, fit: Fit, outcome: Outcome, error: str = "") -> None:
        write_run_file(
            self._folder,
            collect_facts(trainer, module, fit, outcome) | self._read_origin(),
            error=error,
            curves=self.recorded.step_curves(),
            times=collect_times(trainer, fit),
        )
        if self._live is not None:
            self._live.clear()


def _warn_of_failure(failure: Exception) -> None:
    """Warn: a failure to report must not make a run fail that has ended well."""
    rank_zero_warn(f"The report could not be written: {type(failure).__name__}: {failure}")


def _trace_of(error: BaseException) -> str:
    """Return the traceback that the user will see. The error keeps its own, as it goes on."""
    whole: list[tuple[BaseException, TracebackType | None]] = []
    link: BaseException | None = error
    while link is not None and all(link is not other for other, _ in whole):
        whole.append((link, link.__traceback__))
        link = link.__cause__ or link.__context__
    try:
        return "".join(traceback.format_exception(shortened(error)))
    finally:
        for link, trace in whole:
            link.__traceback__ = trace


def _folder_of_failure(trainer: Any) -> AnyPath:
    """Return the folder of the report for a fit that failed before `setup`."""
    folder = None
    # Reading log_dir may need all processes.
    if trainer.world_size == 1:
        folder = trainer.log_dir
    return to_path(folder or trainer.default_root_dir)


def _has_report(path: AnyPath, since: datetime) -> bool:
    """Return True if the main process has written the report of this failure; it reads no notes after that."""
    begun = since.timestamp() * 1e9
    with contextlib.suppress(OSError), path.open("r", encoding="utf-8") as page:
        begin = page.read(_TITLE_RANGE)
        return path.stat().st_mtime_ns >= begun and ": failed</title>" in begin
    return False


def _leave_note(folder: AnyPath, rank: int, error: str) -> None:
    """Leave the error of this process for the main process, which only notices that a process has ended."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        # The main process reads only complete notes.
        write_page(f"\nRank {rank} had failed before:\n\n{error}", folder / f".report-rank-{rank}.txt")


def _take_notes(folder: AnyPath) -> str:
    """Read and remove the notes of other processes; return them in one text, the first to fail at the end."""
    notes = []
    files: list[AnyPath] = [*folder.glob(".report-rank-*.txt")]
    for file in files:
        with contextlib.suppress(OSError):
            text = file.read_text(encoding="utf-8", errors="replace")
            notes.append((file.stat().st_mtime_ns, text))
            file.unlink()
    notes.sort(reverse=True)
    return "".join(text for _, text in notes)


def _list_devices(trainer: Any) -> list[DeviceInfo]:
    """Return the devices of all processes and the CPUs of their machines, without repetition."""
    # 1. Gather the devices of all processes, with the names of their machines.
    node = platform.node()
    device_names = {str(device) for device in devices_of(trainer)}
    device_names.add("cpu")
    infos = [(node, info) for info in list_devices(device_names)]
    if trainer.world_size > 1 and dist.is_available() and dist.is_initialized():
        infos = list(chain.from_iterable(gather_objects(infos)))
    # 2. Several processes may use one device.
    distinct: dict[tuple[str, str], tuple[str, DeviceInfo]] = {}
    for name, info in infos:
        distinct.setdefault((name, info.uuid or info.device), (name, info))
    # 3. Name the machine if there are several.
    nodes = {name for name, _ in distinct.values()}
    if len(nodes) == 1:
        return [info for _, info in distinct.values()]
    return [replace(info, device=f"{name} {info.device}") for name, info in distinct.values()]
