"""RunReport: the callback that writes `report.html`."""

import contextlib
import platform
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import Any

import rich
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from rich.text import Text

from equipoise.callbacks.callback import Callback
from equipoise.callbacks.copied_state import copied_state
from equipoise.errors import ConfigurationError
from equipoise.extensions.report.added_sections import added_sections
from equipoise.extensions.report.collect import collect_record
from equipoise.extensions.report.curve_history import CurveHistory
from equipoise.extensions.report.facts import devices_of, size_function
from equipoise.extensions.report.page.page import write_report
from equipoise.extensions.report.page.record import Outcome
from equipoise.extensions.report.run_summary import RunSummary
from equipoise.extensions.report.throughput import Throughput
from equipoise.formats import format_path
from equipoise.memory.devices import DeviceInfo, list_devices
from equipoise.notices import rank_zero_warn
from equipoise.parallel.communication.object_exchange import gather_objects

__all__ = ["RunReport"]

# Seconds between two reports of a run under way.
_INTERVAL = 60.0
# Characters at the begin of a report that contain its title.
_TITLE_RANGE = 4000


@dataclass(kw_only=True)
class _Run:
    """State of one fit.

    Attributes:
        folder: Folder of the report.
        trainer: The trainer of the fit; None when it is over.
        started: Begin of the fit, as date and time.
        clock: Begin of the fit, as `monotonic` counts.
        size_of: Returns the number of samples of a batch, None if unknown; None when the fit is over.
        throughput: Samples and batches over time.
        share: Share of all samples that this process trains on; None while unknown.
        devices: Devices of all processes.
        first_step: The step at the begin.
        last_step: The step at the end; -1 before.
        written: Time of the last report.
    """

    folder: Path
    trainer: Any = None
    started: datetime = field(default_factory=lambda: datetime.now().astimezone())
    clock: float = field(default_factory=lambda: monotonic())
    size_of: Callable[[Any], int | None] | None = None
    throughput: Throughput = field(default_factory=Throughput)
    share: float | None = None
    devices: list[DeviceInfo] = field(default_factory=list)
    first_step: int = 0
    last_step: int = -1
    written: float = field(default_factory=lambda: monotonic())

    @property
    def is_over(self) -> bool:
        """True after the end of the fit."""
        return self.last_step >= 0

    def attach(self, trainer: Any, module: Any) -> None:
        """Begin to follow a trainer."""
        self.trainer = trainer
        self.size_of = size_function(trainer, module)
        self.devices = _list_devices(trainer)

    def begin_training(self, earlier: "_Run | None") -> None:
        """Note the step at the begin; continue an earlier fit that ended at this step."""
        step = self.trainer.global_step
        self.first_step = step
        if earlier is not None and earlier.last_step == step > 0:
            self.started = earlier.started
            self.clock = earlier.clock
            self.throughput = earlier.throughput
            self.first_step = earlier.first_step
        self.throughput.begin(monotonic())

    def count_all_processes(self) -> None:
        """Compute the share of this process in the samples of all."""
        strategy = self.trainer.strategy
        samples = self.throughput.samples
        counts = torch.tensor([samples, self.throughput.has_unknown_size], device=strategy.root_device)
        all_samples, unknown_sizes = strategy.reduce(counts, reduce_op="sum").tolist()
        self.share = None
        if samples and not unknown_sizes:
            self.share = samples / all_samples

    def note_report(self) -> None:
        """Note the time at which a report is written."""
        self.written = monotonic()

    def end(self, step: int) -> None:
        """End the fit, and release the trainer."""
        self.last_step = step
        self.size_of = None
        self.trainer = None


class RunReport(Callback):
    """Write `report.html` when a fit ends: learning curves, throughput, memory, events, devices, configuration.

    The page contains all its parts and opens without a network. A fit that fails leaves one too, with the error. During
    a fit, the report is written at the beginning of an epoch, at most once a minute. It lies in the folder of the first
    logger, else in `default_root_dir`. A `fast_dev_run` writes none. A report that cannot be written does not fail the
    run: a warning states the reason.

    Memory over time and the tensors at its peak come from a `MemoryLogger` among the callbacks, out-of-memory events
    from an `OOMRecovery`, the picture of a pipeline's last step from its strategy. Learning curves are shared with a
    `RunSummary` if there is one. Otherwise they are recorded here and are part of checkpoints, so those of a resumed
    fit are complete. They show the values that loggers receive, by step, also without a logger.

    Example:
        >>> from equipoise import RunReport, Trainer
        >>> Trainer(max_epochs=3, callbacks=[RunReport()]).fit(model, datamodule=data)  # doctest: +SKIP
    """

    uses_outputs = False

    def __init__(self) -> None:
        self._recorded = CurveHistory()
        self._shared: CurveHistory | None = None
        self._run: _Run | None = None
        self._earlier: _Run | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the curves, without a fit under way."""
        return copied_state(self, _run=None, _earlier=None, _shared=None)

    def state_dict(self) -> dict[str, Any]:
        """Return the curves so far, unless a `RunSummary` records them."""
        if self._shared is not None:
            return {}
        # The trainer writes the checkpoint of an epoch's end when the values of the epoch are final.
        if self._run is not None and self._run.trainer is not None:
            self._recorded.take_epoch(self._run.trainer)
        return self._recorded.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the curves of an earlier process."""
        if state_dict:
            self._recorded.load_state_dict(state_dict)

    # Hooks.

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Start the clock."""
        if stage != "fit":
            return
        self._shared = _shared_curves(trainer)
        # All processes agree on log_dir, so it is read while all of them run this hook.
        folder = _local(trainer.log_dir or trainer.default_root_dir)
        self._earlier = self._run
        self._run = _Run(folder=folder)
        # Remove the notes of an earlier failure.
        if trainer.is_global_zero:
            _take_notes(folder)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """List the devices."""
        if self._run is not None:
            self._run.attach(trainer, pl_module)
            if self._shared is None:
                self._recorded.on_fit_start(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Continue an earlier fit, if this one begins at its end."""
        if self._run is not None:
            self._run.begin_training(self._earlier)
            if self._shared is None:
                self._recorded.on_train_start(trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Write a report, if the last one is a minute old."""
        if (run := self._run) is not None:
            if self._shared is None:
                self._recorded.on_train_epoch_start(trainer)
            if monotonic() - run.written >= _INTERVAL:
                self._write(trainer, pl_module, "running")
            run.throughput.begin(monotonic())

    def on_train_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count the samples."""
        self._recorded.batches_done = batch_idx + 1
        if (run := self._run) is not None and run.size_of is not None:
            run.throughput.add(run.size_of(batch), monotonic())

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Stop the clock of training."""
        if self._run is not None and not trainer.sanity_checking:
            self._run.throughput.pause(monotonic())
            if self._shared is None:
                self._recorded.on_validation_start(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Start the clock of training again."""
        if self._run is not None and not trainer.sanity_checking:
            if self._shared is None:
                self._recorded.on_validation_end(trainer)
            self._run.throughput.begin(monotonic())

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop the clock of training."""
        if self._run is not None:
            self._run.throughput.pause(monotonic())
            if self._shared is None:
                self._recorded.on_train_epoch_end(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Record the last values, and count the samples of all processes."""
        if self._run is None:
            return
        self._run.throughput.pause(monotonic())
        if self._shared is None:
            self._recorded.take_epoch(trainer)
        if trainer.world_size > 1:
            self._run.count_all_processes()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the report."""
        self._recorded.leave(trainer)
        outcome: Outcome = "finished"
        if trainer.received_sigterm:
            outcome = "interrupted"
        self._conclude(trainer, pl_module, outcome)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Write a report with the error and the values up to now."""
        if trainer.state.fn != "fit":
            return
        # 1. A fit that failed before `setup` has no run yet.
        if self._run is None or self._run.is_over:
            # Wrong input is refused in one message, which needs no report.
            if isinstance(exception, (ConfigurationError, MisconfigurationException)):
                return
            # The error of the run is the one to be seen.
            with contextlib.suppress(ConfigurationError):
                self._run = _Run(folder=_folder_of_failure(trainer))
            if self._run is None or self._run.is_over:
                return
        # 2. Record the last values.
        self._run.throughput.pause(monotonic())
        curves = self._shared or self._recorded
        curves.on_exception(trainer)
        if isinstance(exception, KeyboardInterrupt):
            self._conclude(trainer, pl_module, "interrupted")
            return
        # 3. Write the report. The other processes pass their errors on to the main process.
        error = "".join(traceback.format_exception(exception))
        folder = self._run.folder
        if not trainer.is_global_zero and not _has_report(folder / "report.html", self._run.started):
            _leave_note(folder, trainer.global_rank, error)
        if trainer.is_global_zero and trainer.world_size > 1:
            error += _take_notes(folder)
        self._conclude(trainer, pl_module, "failed", error)

    # The report.

    def _conclude(self, trainer: Any, module: Any, outcome: Outcome, error: str = "") -> None:
        run = self._run
        if run is None or run.is_over:
            return
        path = self._write(trainer, module, outcome, error)
        run.end(trainer.global_step)
        self._earlier = None
        if path is not None:
            line = Text.assemble(("Report: ", "dim"), format_path(str(path)))
            rich.get_console().print(line, soft_wrap=True)

    def _write(self, trainer: Any, module: Any, outcome: Outcome, error: str = "") -> Path | None:
        """Write the report in the main process; return its path, None if there is no report."""
        run = self._run
        if run is None or not trainer.is_global_zero or trainer.fast_dev_run:
            return None
        run.note_report()
        path = run.folder / "report.html"
        curves = self._shared or self._recorded
        try:
            record = collect_record(
                trainer,
                module,
                curves=curves.step_curves(),
                epoch_ends=curves.epoch_ends(),
                throughput=run.throughput,
                share=run.share,
                clock=run.clock,
                started=run.started,
                first_step=run.first_step,
                folder=run.folder,
            )
            # The report of a run under way is soon replaced.
            sections = () if outcome == "running" else added_sections(trainer, module)
            record = replace(record, outcome=outcome, error=error, devices=run.devices, sections=sections)
            write_report(record, path)
        except Exception as failure:
            # A failure to report must not make a run fail that has ended well.
            rank_zero_warn(f"The report could not be written: {type(failure).__name__}: {failure}")
            return None
        return path


def _shared_curves(trainer: Any) -> CurveHistory | None:
    """Return the curves of the first `RunSummary`, None without one."""
    for callback in trainer.callbacks:
        if isinstance(callback, RunSummary):
            return callback.recorded
    return None


def _folder_of_failure(trainer: Any) -> Path:
    """Return the folder of the report for a fit that failed before `setup`."""
    folder = None
    # Reading log_dir may need all processes.
    if trainer.world_size == 1:
        folder = trainer.log_dir
    return _local(folder or trainer.default_root_dir)


def _local(folder: str) -> Path:
    """Return a folder as a path of the file system.

    Raises:
        ConfigurationError: If it is a URL.
    """
    if "://" in str(folder):
        raise ConfigurationError(
            f"RunReport writes to a folder of the file system, which {str(folder)!r} is not. Give a logger with a"
            " local `save_dir`, or leave RunReport out."
        )
    return Path(folder)


def _has_report(path: Path, since: datetime) -> bool:
    """Return True if the main process has written the report of this failure; it reads no notes after that."""
    with contextlib.suppress(OSError), path.open(encoding="utf-8") as page:
        is_new = path.stat().st_mtime >= since.timestamp()
        return is_new and ": failed</title>" in page.read(_TITLE_RANGE)
    return False


def _leave_note(folder: Path, rank: int, error: str) -> None:
    """Leave the error of this process for the main process, which only notices that a process has ended."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        text = f"\nRank {rank} had failed before:\n\n{error}"
        # The main process reads only complete notes.
        draft = folder / f".report-rank-{rank}.tmp"
        draft.write_text(text, encoding="utf-8", errors="replace")
        draft.replace(draft.with_suffix(".txt"))


def _take_notes(folder: Path) -> str:
    """Read and remove the notes of other processes; return them in one text, the first to fail at the end."""
    notes = []
    for file in folder.glob(".report-rank-*.txt"):
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
        key = (name, info.uuid or info.device)
        distinct.setdefault(key, (name, info))
    # 3. Name the machine if there are several.
    nodes = {name for name, _ in distinct.values()}
    if len(nodes) == 1:
        return [info for _, info in distinct.values()]
    return [replace(info, device=f"{name} {info.device}") for name, info in distinct.values()]
