"""RunReport: the callback that writes `report.html`."""

import contextlib
import platform
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from time import monotonic
from typing import Any

import rich
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from rich.text import Text

from equipoise.callbacks.callback import Callback
from equipoise.errors import ConfigurationError
from equipoise.memory.devices import DeviceInfo, list_devices
from equipoise.notices import rank_zero_warn
from equipoise.parallel.communication.object_exchange import gather_objects
from equipoise.report.collect import collect_record
from equipoise.report.curve_history import CurveHistory
from equipoise.report.facts import devices_of, shorten, size_function
from equipoise.report.page.page import write_report
from equipoise.report.page.record import Outcome
from equipoise.report.run_summary import RunSummary
from equipoise.report.throughput import Throughput

__all__ = ["RunReport"]

_OFTEN = 60.0  # seconds between two reports of a run that goes on


@dataclass(kw_only=True)
class _Run:
    """A fit as it is seen here.

    Attributes:
        folder: Where the report goes.
        trainer: Whose fit it is; None when it is over.
        started: When it began, for people; `clock`: for the computer, as `monotonic` counts.
        size_of: Tells the samples of a batch; None when the run is over.
        throughput: How fast it is.
        share: The part of all samples that this process sees; None as long as nobody has asked the others.
        devices: Those of all processes.
        first_step: Where it began; `last_step`: where it ended.
        written: When the report was written last.
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


class RunReport(Callback):
    """Writes `report.html` when a fit ends: learning curves, throughput, memory, what happened, devices, configuration.

    The page is complete in itself and opens without a network. A fit that fails leaves one too, with the error; one
    that goes on has its last state written at the beginning of an epoch, at most once a minute. It lies in the folder
    of the first logger, else in `default_root_dir`. A `fast_dev_run` writes none. That a report cannot be written fails
    no run: a warning says why.

    Memory over time, and what its peak was made of, come from a `MemoryLogger` among the callbacks, out-of-memory
    events from an `OOMRecovery`, the picture of a pipeline's last step from its strategy. Learning curves are shared
    with a `RunSummary` if there is one, else they are recorded here and are part of checkpoints, so those of a resumed
    fit are whole. They go by step: what loggers are handed, at its step, also if there is no logger.

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
        """The curves; neither a fit under way nor the methods that Lightning lends to callbacks."""
        kept = {name: value for name, value in vars(self).items() if name not in ("log", "log_dict")}
        return {**kept, "_run": None, "_earlier": None, "_shared": None}

    def state_dict(self) -> dict[str, Any]:
        """The curves so far, unless somebody else keeps them."""
        if self._shared is not None:
            return {}
        if self._run is not None and self._run.trainer is not None:
            # A checkpoint of an epoch's end is written when its values are known.
            self._recorded.take_epoch(self._run.trainer)
        return self._recorded.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on with the curves of an earlier process."""
        if state_dict:
            self._recorded.load_state_dict(state_dict)

    # What is seen.

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Starts the clock."""
        if stage != "fit":
            return
        summary = next((callback for callback in trainer.callbacks if isinstance(callback, RunSummary)), None)
        self._shared = None if summary is None else summary.recorded
        # log_dir is agreed upon by all processes, so it is asked for while all are here.
        self._earlier, self._run = self._run, _Run(folder=Path(trainer.log_dir or trainer.default_root_dir))
        if trainer.is_global_zero:
            _take_notes(self._run.folder)  # of an earlier failure

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Looks at the devices."""
        if (run := self._run) is not None:
            run.trainer = trainer
            run.size_of = size_function(trainer, pl_module)
            run.devices = _list_devices(trainer)
            if self._shared is None:
                self._recorded.on_fit_start(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Goes on with an earlier fit, if this one begins where that one ended."""
        if (run := self._run) is not None:
            run.first_step = trainer.global_step
            if (earlier := self._earlier) is not None and earlier.last_step == trainer.global_step > 0:
                run.started, run.clock, run.throughput = earlier.started, earlier.clock, earlier.throughput
                run.first_step = earlier.first_step
            run.throughput.begin(monotonic())
            if self._shared is None:
                self._recorded.on_train_start(trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Writes down how things stand, if that was long ago."""
        if (run := self._run) is not None:
            if self._shared is None:
                self._recorded.on_train_epoch_start(trainer)
            if monotonic() - run.written >= _OFTEN:
                self._write(trainer, pl_module, "running")
            run.throughput.begin(monotonic())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Counts the samples."""
        self._recorded.batches_done = batch_idx + 1
        if (run := self._run) is not None and run.size_of is not None:
            run.throughput.add(run.size_of(batch), monotonic())

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Stops counting."""
        if (run := self._run) is not None and not trainer.sanity_checking:
            run.throughput.pause(monotonic())
            if self._shared is None:
                self._recorded.on_validation_start(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Goes on counting."""
        if (run := self._run) is not None and not trainer.sanity_checking:
            if self._shared is None:
                self._recorded.on_validation_end(trainer)
            run.throughput.begin(monotonic())

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Stops counting."""
        if (run := self._run) is not None:
            run.throughput.pause(monotonic())
            if self._shared is None:
                self._recorded.on_train_epoch_end(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Takes the last values, and asks how many samples all processes saw."""
        if (run := self._run) is None:
            return
        run.throughput.pause(monotonic())
        if self._shared is None:
            self._recorded.take_epoch(trainer)
        if trainer.world_size > 1:
            own = run.throughput.samples
            counts = torch.tensor([own, run.throughput.countless], device=trainer.strategy.root_device)
            samples, countless = trainer.strategy.reduce(counts, reduce_op="sum").tolist()
            run.share = None if countless or not own else own / samples

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Writes the report."""
        self._recorded.leave(trainer)
        self._conclude(trainer, pl_module, "interrupted" if trainer.received_sigterm else "finished")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Writes what there is, and the error."""
        if trainer.state.fn != "fit":
            return
        if self._run is None or self._run.last_step >= 0:  # it failed before anything was set up
            if isinstance(exception, (ConfigurationError, MisconfigurationException)):
                return  # told in one message, before anything was done
            folder = trainer.default_root_dir if trainer.world_size > 1 else trainer.log_dir
            self._run = _Run(folder=Path(folder or trainer.default_root_dir))
        self._run.throughput.pause(monotonic())
        (self._shared or self._recorded).on_exception(trainer)
        if isinstance(exception, KeyboardInterrupt):
            self._conclude(trainer, pl_module, "interrupted")
            return
        error = "".join(traceback.format_exception(exception))
        if not trainer.is_global_zero and not _is_told(self._run.folder / "report.html", self._run.started):
            _leave_note(self._run.folder, trainer.global_rank, error)
        if trainer.is_global_zero and trainer.world_size > 1:
            error += _take_notes(self._run.folder)
        self._conclude(trainer, pl_module, "failed", error)

    # What is made of it.

    def _conclude(self, trainer: Any, module: Any, outcome: Outcome, error: str = "") -> None:
        if (run := self._run) is None or run.last_step >= 0:
            return
        path = self._write(trainer, module, outcome, error)
        run.last_step, run.size_of, run.trainer, self._earlier = trainer.global_step, None, None, None
        if path is not None:
            rich.get_console().print(Text.assemble(("Report: ", "dim"), shorten(str(path))), soft_wrap=True)

    def _write(self, trainer: Any, module: Any, outcome: Outcome, error: str = "") -> Path | None:
        """Writes the report in the main process; returns where it is, None if there is none."""
        run = self._run
        if run is None or not trainer.is_global_zero or trainer.fast_dev_run:
            return None
        run.written = monotonic()
        path = run.folder / "report.html"
        recorded = self._shared or self._recorded
        try:
            record = collect_record(
                trainer,
                module,
                curves=recorded.step_curves(),
                epoch_ends=recorded.epoch_ends(),
                throughput=run.throughput,
                share=run.share,
                clock=run.clock,
                started=run.started,
                first_step=run.first_step,
                folder=run.folder,
            )
            write_report(replace(record, outcome=outcome, error=error, devices=run.devices), path)
        except Exception as failure:  # how a run went does not hang on what is told of it
            rank_zero_warn(f"The report could not be written: {type(failure).__name__}: {failure}")
            return None
        return path


def _is_told(path: Path, since: datetime) -> bool:
    """Whether the main process has written the report of this failure already, so that nobody would read a note."""
    with contextlib.suppress(OSError), path.open(encoding="utf-8") as page:
        return path.stat().st_mtime >= since.timestamp() and ": failed</title>" in page.read(4000)
    return False


def _leave_note(folder: Path, rank: int, error: str) -> None:
    """Tells the main process why this one failed: all that one sees is that somebody is gone."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f".report-rank-{rank}.tmp"
        draft.write_text(f"\nRank {rank} had failed before:\n\n{error}", encoding="utf-8", errors="replace")
        draft.replace(draft.with_suffix(".txt"))


def _take_notes(folder: Path) -> str:
    """What other processes have left, the first to fail at the end; they are removed."""
    told = []
    for note in folder.glob(".report-rank-*.txt"):
        with contextlib.suppress(OSError):
            told.append((note.stat().st_mtime_ns, note.read_text(encoding="utf-8", errors="replace")))
            note.unlink()
    return "".join(text for _, text in sorted(told, reverse=True))


def _list_devices(trainer: Any) -> list[DeviceInfo]:
    """The devices of all processes, each once, and the CPUs of their machines."""
    node = platform.node()
    infos = [(node, info) for info in list_devices({"cpu", *map(str, devices_of(trainer))})]
    if trainer.world_size > 1 and dist.is_available() and dist.is_initialized():
        infos = [each for some in gather_objects(infos) for each in some]
    known: dict[tuple[str, str], tuple[str, DeviceInfo]] = {}
    for name, info in infos:
        known.setdefault((name, info.uuid or info.device), (name, info))
    several = len({name for name, _ in known.values()}) > 1
    return [replace(info, device=f"{name} {info.device}") if several else info for name, info in known.values()]
