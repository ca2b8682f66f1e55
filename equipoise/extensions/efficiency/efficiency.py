"""Efficiency: the callback that says how well a run uses its devices."""

import math
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from equipoise.callbacks.callback import Callback
from equipoise.callbacks.copied_state import copied_state
from equipoise.errors import ConfigurationError
from equipoise.extensions.efficiency.energy import EnergyMeter, meters_for
from equipoise.extensions.efficiency.peaks import peak_of
from equipoise.extensions.efficiency.step_operations import StepOperations
from equipoise.extensions.efficiency.usage import Usage
from equipoise.extensions.report.fit_recorder import Fit
from equipoise.extensions.report.throughput import Throughput, batches_of_step
from equipoise.validation import check_whole

__all__ = ["Efficiency"]

_MOST_EPOCHS = 500
# Steps that compile, choose kernels, and allocate the optimiser's state.
_FIRST_STEPS = 3


class Efficiency(Callback):
    """Say how well a run uses its devices: operations a second, their share of the peak, tokens, samples, energy.

    The operations of one step are counted once, by torch's formulas, in its forward and backward; from the samples of
    that step follow those of all others. Their number a second, divided by the peak that the maker of the device states
    for the precision of the run, is what the field calls MFU. Operations that activation checkpointing repeats count as
    often as they are computed. Energy is that of the whole device or processor, also where other programs use it.

    `RunSummary` shows the values of the run, and `RunReport` those of each epoch. The first three steps, which compile
    and allocate, and validations are left out of all but the energy. A value that cannot be had, such as the peak of an
    unknown device, is left out, and the report says why.

    The step whose operations are counted takes longer, and is computed without the compiler's backend. If it runs out
    of memory or has no operations, the next one is counted, up to the fifth. In all other steps the callback costs
    about 2 µs.

    Args:
        peak: Operations a second of one device at most. Default: None, by the name of the device.
        tokens: Returns the number of tokens of a batch. Default: None, the number of elements of its "input_ids",
            padding included.
        log: Log `efficiency/...` at the end of each epoch. Default: False.
        counted_step: Number of the step of a fit whose operations are counted, from 0. Default: 1.

    Attributes:
        usage: The values of the run in this process; None before the end of a training.
        history: The step at the end of each epoch, and its values; at most 500, thinned.
        why_not_counted: The reason why operations were not counted; empty if they were.

    Raises:
        ConfigurationError: If `peak` is not above 0, or `counted_step` not a number from 0.

    Example:
        >>> from equipoise import Efficiency, Trainer
        >>> Trainer(callbacks=[Efficiency(peak=312e12)], max_epochs=1).fit(module, loader)  # doctest: +SKIP
    """

    uses_outputs = False

    def __init__(
        self,
        *,
        peak: float | None = None,
        tokens: Callable[[Any], int] | None = None,
        log: bool = False,
        counted_step: int = 1,
    ) -> None:
        if peak is not None and not peak > 0:
            raise ConfigurationError(f"peak must be a number of operations a second above 0, not {peak!r}.")
        check_whole("counted_step", counted_step, least=0)
        self.peak = peak
        self.log_values = log
        self.counted_step = counted_step
        self.usage: Usage | None = None
        self.history: list[tuple[int, Usage]] = []
        self.why_not_counted = ""
        self._tokens_of = tokens or _tokens_of
        self._forget()

    def _forget(self) -> None:
        self._fit: Fit | None = None
        self._operations: StepOperations | None = None
        self._first_steps = max(_FIRST_STEPS, self.counted_step + 1)
        self._tokens = 0
        self._meters: list[EnergyMeter] = []
        # Samples of the step whose operations are counted; 0 if unknown.
        self._counted_size = 0
        # Batches whose size is unknown.
        self._without_size = 0
        # The run up to the end of the last epoch.
        self._earlier: Usage | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return options and results, without a fit under way."""
        return copied_state(self, _fit=None, _operations=None, _meters=[], _earlier=None)

    # The run.

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Begin to count."""
        self._forget()
        self.usage = None
        self.history = []
        self._fit = Fit()
        self._fit.attach(trainer, pl_module)
        self._fit.begin_training()
        self.why_not_counted = _obstacle(trainer)
        if not self.why_not_counted:
            self._operations = StepOperations(self.counted_step)
        devices = getattr(trainer.strategy, "devices", None) or [trainer.strategy.root_device]
        self._meters = meters_for(devices, with_processors=trainer.local_rank == 0)

    def wrap_call(self, trainer: Any, action: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Count the operations of one step."""
        if self._operations is None or not action.startswith("[Strategy]") or not trainer.training:
            return function
        # The user's step and its backward. Recovery from a lack of memory repeats them within one call.
        name = action.rpartition(".")[2]
        if name == "forward_backward":
            return self._operations.counting(function)
        if name in ("training_step", "backward"):
            return self._operations.watching(function)
        return function

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Start the clock of the epoch."""
        if self._fit is not None:
            self._fit.begin_epoch()

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the samples and tokens of a batch."""
        fit = self._fit
        if fit is None:
            return
        before = fit.throughput.samples
        fit.count_batch(batch)
        size = fit.throughput.samples - before
        self._without_size += not size
        self._tokens += sum(map(self._tokens_of, batches_of_step(trainer.strategy, batch)))
        if self._first_steps:
            self._end_first_step(fit, size)

    def _end_first_step(self, fit: Fit, size: int) -> None:
        """Note the size of the step whose operations were counted, and begin anew after the last of the first steps."""
        operations = self._operations
        # Until a step is counted they all are first steps.
        is_pending = False
        if operations is not None and operations.count is None:
            operations.end_step()
            self._counted_size = size
            self.why_not_counted = operations.why_not
            is_pending = operations.is_pending
        self._first_steps = max(self._first_steps - 1, int(is_pending))
        if not self._first_steps:
            fit.throughput = Throughput()
            fit.throughput.begin(monotonic())
            self._tokens = 0
            self._without_size = 0

    def on_validation_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Stop the clock."""
        if self._fit is not None:
            self._fit.throughput.pause(monotonic())

    def on_validation_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Start the clock again."""
        if self._fit is not None:
            self._fit.throughput.begin(monotonic())

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Note the values of the epoch, and log them, if that is wanted."""
        fit = self._fit
        if fit is None:
            return
        fit.end_epoch()
        total = self._totals(trainer, fit)
        epoch = total.since(self._earlier)
        self._earlier = total
        self.history.append((trainer.global_step, epoch))
        # A long run keeps every second, fourth, eighth ... epoch of its past.
        if len(self.history) > _MOST_EPOCHS:
            del self.history[::2]
        if self.log_values:
            for name, value in epoch.values().items():
                pl_module.log(f"efficiency/{name}", value)

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Show the values of the run."""
        fit = self._fit
        if fit is None:
            return
        fit.throughput.pause(monotonic())
        if self._operations is not None and self._operations.is_pending:
            self.why_not_counted = "the run ended before a step with operations"
        self.usage = self._totals(trainer, fit)
        rows = getattr(trainer, "summary_rows", {})
        rows.update(self.usage.rows())

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Forget the fit."""
        self._forget()

    # Values.

    def _totals(self, trainer: Any, fit: Fit) -> Usage:
        """Return the values of the run up to now: sums over all processes."""
        throughput = fit.throughput
        # Processes that compute a batch together have all counted it.
        processes = trainer.world_size
        together = 1.0
        if processes > 1:
            together = processes / trainer.strategy.distributed_sampler_kwargs["num_replicas"]
        joules = sum(meter.joules() for meter in self._meters)
        counts = [throughput.samples, throughput.batches, self._tokens, self._computed(fit)]
        # First steps are not measured.
        seconds = throughput.seconds
        if self._first_steps:
            counts = [0.0] * len(counts)
            seconds = 0.0
        # A size that one process does not know is unknown to all.
        elif throughput.has_unknown_size:
            counts[0] = math.nan
        counts.append(joules)
        sums = torch.tensor(counts, dtype=torch.float64)
        if processes > 1:
            sums = trainer.strategy.reduce(sums.to(trainer.strategy.root_device), reduce_op="sum").cpu()
        samples, batches, tokens, computed, joules = sums.tolist()
        if math.isnan(samples):
            samples = 0.0
        return Usage(
            seconds=seconds,
            samples=samples / together,
            batches=batches / processes,
            tokens=tokens / together,
            operations=computed,
            peak=self._peak_of_all(trainer),
            joules=joules if self._meters or joules else None,
        )

    def _computed(self, fit: Fit) -> float:
        """Return the operations of all steps of this process, after those of one."""
        operations = self._operations
        if operations is None or operations.count is None:
            return 0.0
        throughput = fit.throughput
        # Without sizes all batches count as equal.
        if not self._counted_size:
            return float(operations.count * throughput.batches)
        return operations.count * (throughput.samples / self._counted_size + self._without_size)

    def _peak_of_all(self, trainer: Any) -> float | None:
        # All devices count as those of this process.
        device = torch.device(trainer.strategy.root_device)
        peak = self.peak
        if peak is None and device.type == "cuda":
            peak = peak_of(torch.cuda.get_device_name(device), str(trainer.precision))
        if peak is None:
            return None
        return peak * float(trainer.world_size)


def _obstacle(trainer: Any) -> str:
    """Return why the operations of a step cannot be counted; empty if they can."""
    strategy = trainer.strategy
    if not hasattr(strategy, "devices"):
        return "Lightning's Trainer does not call `wrap_call`"
    if len(strategy.devices) > 1:
        return f"strategy={strategy.name!r} computes a step in several threads"
    if trainer.captures_steps:
        return "the steps are captured as a CUDA graph"
    # A pipeline counts only its first processes, which have the data.
    are_stages = getattr(strategy, "engine", None) == "processes"
    if are_stages or trainer.world_size > strategy.distributed_sampler_kwargs["num_replicas"]:
        return f"strategy={strategy.name!r} computes a batch in several processes together"
    return ""


def _tokens_of(batch: Any) -> int:
    if isinstance(batch, Mapping):
        tokens = batch.get("input_ids")
        if isinstance(tokens, Tensor):
            return tokens.numel()
    return 0
