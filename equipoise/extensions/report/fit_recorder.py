"""FitRecorder: the base of the callbacks that record a fit, with its learning curves, speed and times."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from time import monotonic
from typing import Any

import torch

from equipoise.callbacks.callback import Callback
from equipoise.callbacks.copied_state import copied_state
from equipoise.extensions.report.curve_history import CurveHistory, steps_done
from equipoise.extensions.report.throughput import Throughput, batches_of_step, samples_of
from equipoise.parallel.batches.splitting import Splitter

__all__ = ["Fit", "FitRecorder", "size_function"]


@dataclass(kw_only=True)
class Fit:
    """Counts and times of one fit. Times are seconds of `monotonic`.

    Attributes:
        started: Start of the fit, as date and time.
        clock: Start of the fit.
        trainer: The trainer; None when the fit is over.
        processes: Number of processes.
        size_of: Returns the number of samples of a batch, None if unknown; None when the fit is over.
        throughput: Samples and batches over time, without validations.
        share: Share of all samples that this process trains on; None while unknown.
        first_epoch: First epoch of the fit; None before training.
        first_step: The step at the start.
        last_step: The step at the end; -1 before.
        epochs: Number of finished epochs.
        epoch_time: Time in finished epochs, with validations.
    """

    started: datetime = field(default_factory=lambda: datetime.now().astimezone())
    clock: float = field(default_factory=lambda: monotonic())
    trainer: Any = None
    processes: int = 1
    size_of: Callable[[Any], int | None] | None = None
    throughput: Throughput = field(default_factory=Throughput)
    share: float | None = None
    first_epoch: int | None = None
    first_step: int = 0
    last_step: int = -1
    epochs: int = 0
    epoch_time: float = 0.0
    _epoch_started: float = 0.0

    def attach(self, trainer: Any, module: Any) -> None:
        """Begin to follow a trainer."""
        self.trainer = trainer
        self.processes = trainer.world_size
        self.size_of = size_function(trainer, module)

    def begin_training(self) -> None:
        """Note the point where training begins."""
        self.first_epoch = self.trainer.current_epoch
        self.first_step = steps_done(self.trainer)
        # An epoch that is resumed in its middle does not start again.
        self.begin_epoch()

    def continue_from(self, earlier: "Fit") -> None:
        """Continue a fit that ended where this one begins."""
        self.started = earlier.started
        self.clock = earlier.clock
        self.first_step = earlier.first_step
        self.throughput = earlier.throughput
        self.throughput.begin(monotonic())

    def begin_epoch(self) -> None:
        """Start the clock of an epoch."""
        self._epoch_started = monotonic()
        self.throughput.begin(self._epoch_started)

    def count_batch(self, batch: Any) -> None:
        """Count the samples of the step whose hooks receive a batch."""
        if self.size_of is None:
            return
        # A process may have computed several batches, of which hooks receive the first.
        batches = batches_of_step(self.trainer.strategy, batch)
        now = monotonic()
        self.throughput.add(samples_of(batches, self.size_of), now)

    def end_epoch(self) -> None:
        """Stop the clock of a finished epoch."""
        now = monotonic()
        self.throughput.pause(now)
        self.epoch_time += now - self._epoch_started
        self.epochs += 1

    def count_all_processes(self) -> None:
        """Compute the share of this process in the samples of all."""
        strategy = self.trainer.strategy
        samples = self.throughput.samples
        counts = torch.tensor([samples, self.throughput.has_unknown_size], device=strategy.root_device)
        all_samples, unknown_sizes = strategy.reduce(counts, reduce_op="sum").tolist()
        # Processes that compute a batch together have all counted it.
        times_counted = self.processes / strategy.distributed_sampler_kwargs["num_replicas"]
        if samples and not unknown_sizes:
            self.share = samples * times_counted / all_samples

    @property
    def speed_unit(self) -> str:
        """Unit of the speed: samples, or batches if the size of one was unknown, of all processes if they are known."""
        unit = "samples per second"
        if self.throughput.has_unknown_size:
            unit = "batches per second"
        if self.processes > 1 and self.share is None:
            return f"{unit} of the first process"
        return unit

    @property
    def speed(self) -> float:
        """Samples or batches per second of training; 0 without a batch."""
        throughput = self.throughput
        count = throughput.batches if throughput.has_unknown_size else throughput.samples
        if throughput.seconds <= 0:
            return 0.0
        return self.factor * count / throughput.seconds

    @property
    def factor(self) -> float:
        """Factor from the counts of this process to those of all."""
        return 1 / (self.share or 1.0)


class FitRecorder(Callback):
    """Record the learning curves, the samples over time and the duration of epochs of a fit.

    Attributes:
        recorded: The recorded curves.
    """

    uses_outputs = False

    def __init__(self) -> None:
        self.recorded = CurveHistory()
        self._fit: Fit | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the curves and the options, without a fit under way."""
        return copied_state(self, _fit=None)

    def state_dict(self) -> dict[str, Any]:
        """Return the curves so far."""
        # The trainer writes the checkpoint of an epoch's end when the values of the epoch are final.
        if self._fit is not None and self._fit.trainer is not None:
            self.recorded.take_epoch(self._fit.trainer)
        return self.recorded.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the curves of an earlier process."""
        self.recorded.load_state_dict(state_dict)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Start the clock."""
        if stage == "fit":
            self._fit = Fit()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to receive the values that loggers receive."""
        if self._fit is not None:
            self._fit.attach(trainer, pl_module)
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
        """Stop the clock of training."""
        if self._fit is not None and not trainer.sanity_checking:
            self._fit.throughput.pause(monotonic())
            self.recorded.on_validation_start(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Record the values of a validation, at the finished fraction of the epoch."""
        if self._fit is not None and not trainer.sanity_checking:
            self.recorded.on_validation_end(trainer)
            self._fit.throughput.begin(monotonic())

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop the epoch's clock. Its values are read later: the module may log more after this."""
        if self._fit is not None:
            self.recorded.on_train_epoch_end(trainer)
            self._fit.end_epoch()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Record the last values, and count the samples of all processes."""
        if self._fit is None:
            return
        self._fit.throughput.pause(monotonic())
        self.recorded.take_epoch(trainer, is_last=True)
        if trainer.world_size > 1:
            self._fit.count_all_processes()


def size_function(trainer: Any, module: Any) -> Callable[[Any], int | None]:
    """Return a function from the batch that `on_train_batch_end` receives to the number of samples of the step.

    That function returns None if the number is unknown.
    """
    return Splitter(module, getattr(trainer.strategy, "dim", 0)).size
