"""Micro-batching after an out-of-memory error: run a batch that the strategy has split, and learn sizes that fit."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule

from equipoise.callbacks.callback import Callback
from equipoise.errors import ConfigurationError, StepError
from equipoise.memory.devices import free_memory
from equipoise.memory.footprint import footprint_of
from equipoise.memory.out_of_memory import (
    OutOfMemoryEvent,
    Phase,
    Split,
    device_of,
    free_bytes,
    is_out_of_memory,
    requested_bytes,
)
from equipoise.parallel.device_work import empty_cache
from equipoise.parallel.step_protocols import StepResult
from equipoise.strategies.strategy import Strategy, splitter_of
from equipoise.trainer.hooks.hooks import Hooks, overrides
from equipoise.trainer.recovery.captured_error import CapturedError, raise_with_advice
from equipoise.trainer.recovery.micro_batch_outputs import detached, outputs_in_order
from equipoise.trainer.state.run_state import RunState
from equipoise.tree import entries_of
from equipoise.validation import is_whole

__all__ = ["FittingSizes", "Measure", "MicroBatcher", "refuse_to_repeat"]

# Number of times that the same computation is tried. A callback may wait for memory, but not forever.
_MOST_REPEATS = 5
Shapes = tuple[tuple[int, ...], ...]


class Measure(NamedTuple):
    """Kind of a batch, which batches share that need as much memory for each sample, and its number of samples."""

    kind: Shapes
    size: int


@dataclass
class _FittingSize:
    """Number of samples that fit together, for batches of one kind.

    Attributes:
        samples: Number of samples.
        grow_after: Number of batches after which a size twice as large is tried. 0: never.
        batches: Number of batches of this size that went well.
        last_fitting: Number of samples that fits for certain, while a larger one is tried; 0 otherwise.
    """

    samples: int
    grow_after: int
    batches: int = 0
    last_fitting: int = 0

    def note_success(self, size: int) -> None:
        self.batches += 1
        if self.last_fitting and size > self.last_fitting:
            # The larger size fits.
            self.last_fitting = 0
        is_trying = self.last_fitting > 0
        if not is_trying and self.grow_after and self.batches >= self.grow_after:
            self.last_fitting = self.samples
            self.samples = 2 * self.samples
            self.batches = 0

    def note_failure(self, samples: int) -> None:
        """Note that memory ran out; use the size before, or this number of samples."""
        if self.last_fitting:
            self.grow_after *= 2
            samples = self.last_fitting
        self.samples = samples
        self.batches = 0
        self.last_fitting = 0


# What is learned in one stage of a run.
FittingSizes = dict[Shapes, _FittingSize]


class MicroBatcher:
    """Compute batches in as many micro-batches as they need, and learn how many that is.

    Args:
        state: Contains the optimisers and counters.
        module: The user's module.
        strategy: The strategy.
        hooks: The hooks, among them those that decide.
        compute: Function that computes a batch or a micro-batch: `compute(parts, is_last)`.
        sizes: The sizes that fit, as far as they are known. Default: none.
    """

    def __init__(
        self,
        state: RunState,
        module: LightningModule,
        strategy: Strategy,
        hooks: Hooks,
        compute: Callable[[Sequence[Any], bool], Any],
        sizes: FittingSizes | None = None,
    ) -> None:
        self._state = state
        self._module = module
        self._hooks = hooks
        self._compute = compute
        self._strategy = strategy
        self._splitter = splitter_of(strategy, module)
        # Number of answers in a row that did not ask for smaller micro-batches.
        self._repeats = 0
        self._sizes: FittingSizes = {} if sizes is None else sizes

    # Sizes

    def _kind(self, parts: Sequence[Any]) -> Shapes:
        """Return the shapes of a batch's tensors without the dimension of the samples."""
        dim = self._splitter.dim
        shapes = [tuple(tensor.shape) for part in parts for _, tensor in entries_of(part)]
        return tuple(shape[:dim] + shape[dim + 1 :] for shape in shapes)

    def count(self, measure: Measure | None) -> int:
        """Return the number of micro-batches of a batch, by what earlier batches of its kind needed."""
        if measure is None:
            return 1
        # The quotient, rounded up.
        return -(-measure.size // self._sizes[measure.kind].samples)

    def size(self, parts: Sequence[Any]) -> int:
        """Return the number of samples of a batch that must be split."""
        return sum(self._splitter.size_to_cut(part) for part in parts)

    def most(self, parts: Sequence[Any]) -> tuple[int | None, int, str]:
        """Return the number of samples of a batch, the largest number of micro-batches, and why there are not more."""
        if not parts:
            return None, 1, ""
        try:
            sizes = [self._splitter.size_to_cut(part) for part in parts]
        except StepError as error:
            return None, 1, str(error)
        return sum(sizes), max(sizes), ""

    def measure(self, parts: Sequence[Any]) -> Measure | None:
        """Return the kind and size of a batch, before a step takes something out of it; None if no size is known."""
        if not self._sizes:
            return None
        kind = self._kind(parts)
        if kind not in self._sizes:
            return None
        return Measure(kind, self.size(parts))

    def note_success(self, measure: Measure | None) -> None:
        """Note that a batch went well."""
        self._repeats = 0
        if measure is None:
            return
        fitting = self._sizes.get(measure.kind)
        if fitting is not None:
            fitting.note_success(measure.size)

    def note_failure(self, parts: Sequence[Any], split: Split) -> None:
        """Note that a batch is split into more micro-batches from now on."""
        kind = self._kind(parts)
        # The quotient, rounded up.
        samples = max(1, -(-self.size(parts) // split.parts))
        fitting = self._sizes.get(kind)
        if fitting is None:
            self._sizes[kind] = _FittingSize(samples, split.grow_after)
        else:
            fitting.note_failure(samples)

    # Computation

    def run(self, step: Any, parts: Sequence[Any], count: int) -> StepResult:
        """Compute a batch in micro-batches."""
        micro_batches = self._strategy.recovery.split(parts, count, self._splitter)
        # Before a step takes something out of them.
        sizes = [self.size(micro_batch) for micro_batch in micro_batches]
        device = self._strategy.root_device
        dim = self._splitter.dim
        results: list[StepResult] = []
        step.begin_micro_batches()
        try:
            # 1. The micro-batches, one after another. Processes exchange gradients with the last one.
            for index, micro_batch in enumerate(micro_batches):
                is_last = index + 1 == len(micro_batches)
                compute = partial(self._compute, micro_batch, is_last)
                result, logged = step.capture_logs(compute)
                results.append(detached(result)._replace(logged=logged))
                # Its graph goes before the next one.
                del result
            # 2. The loss and the logs of all. Outputs are put together apart, in the order of the data.
            without_outputs = [result._replace(outputs=None) for result in results]
            merged: StepResult = step.merge(without_outputs, sizes, device, dim=dim, original=lambda metric: metric)
        finally:
            step.end_micro_batches()
        outputs = outputs_in_order(micro_batches, results, sizes, device, dim)
        return merged._replace(outputs=step.finished(outputs))

    # Errors

    def event(
        self, captured: CapturedError, phase: Phase, batch_idx: int, parts: Sequence[Any], count: int, refusal: str = ""
    ) -> OutOfMemoryEvent:
        """Return the event for callbacks, and note in the error what the model held.

        Args:
            captured: The error.
            phase: The phase that failed.
            batch_idx: The number of the batch.
            parts: The batch, as the strategy has placed it.
            count: The number of micro-batches.
            refusal: The reason why it cannot be repeated, whatever callbacks answer; empty if it can.
        """
        size, most, obstacle = self.most(parts)
        failed_device = self._strategy.recovery.device_of_failure(device_of(captured.message))
        device = str(failed_device or self._strategy.root_device)
        captured.footprint = footprint_of(self._module, self._state.optimizers, device)
        free = free_bytes(captured.message)
        if free is None:
            free = free_memory(device)
        return OutOfMemoryEvent(
            phase=phase,
            device=device,
            batch_idx=batch_idx,
            batch_size=size,
            parts=count,
            most_parts=1 if refusal else most,
            obstacle=refusal or obstacle,
            requested=requested_bytes(captured.message),
            free=free,
            message=captured.message,
            step=self._state.progress.global_step(self._module),
            seconds=time.monotonic(),
            global_rank=self._strategy.processes.rank,
            can_repeat=not refusal,
        )

    def ask(self, event: OutOfMemoryEvent) -> Split | None:
        """Return the decision of the callbacks; None: raise the error."""
        for callback in self._hooks.callbacks:
            if not overrides(callback, "on_out_of_memory", Callback):
                continue
            decision = callback.on_out_of_memory(  # type: ignore[attr-defined]
                self._hooks.trainer, self._module, event
            )
            if decision is None:
                continue
            split = _as_split(decision, callback)
            if 0 < split.parts <= event.parts:
                self._repeats += 1
            else:
                self._repeats = 0
            if self._repeats > _MOST_REPEATS:
                return None
            return split
        return None

    def with_second_attempt(self, function: Callable[[], None]) -> None:
        """Run a function that may be run again; if memory runs out, free memory and run it once more."""
        try:
            function()
            return
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        # Outside of `except`, whose traceback keeps the tensors of the failed attempt alive.
        self.free_memory()
        function()

    def free_memory(self) -> None:
        """Free what the failed attempt held, in cycles and in the allocator's cache."""
        gc.collect()
        empty_cache(self._strategy.devices)


def _as_split(decision: Any, callback: Any) -> Split:
    """Return the decision of a callback as a Split."""
    if isinstance(decision, Split):
        return decision
    if not is_whole(decision, least=0):
        raise ConfigurationError(
            f"{type(callback).__name__}.on_out_of_memory returns a number of parts from 0, a Split or None, not"
            f" {decision!r}."
        )
    return Split(decision)


_BY_HAND = (
    "The module optimises by hand (automatic_optimization=False): its step may have changed parameters already, so it"
    " cannot be done again. A smaller batch_size, precision='bf16-mixed' or activation checkpointing would help."
)


def refuse_to_repeat(
    state: RunState, module: LightningModule, strategy: Strategy, hooks: Hooks, run: Callable[..., StepResult]
) -> Callable[..., StepResult]:
    """Return a function that runs a step of manual optimisation, and raises an out-of-memory error with advice."""
    micro_batcher = MicroBatcher(state, module, strategy, hooks, lambda parts, is_last: StepResult(None, None, None))

    def run_once(step: Any, parts: Sequence[Any], last: bool) -> StepResult:
        try:
            return run(step, parts, last)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            captured = CapturedError.of(error)
        event = micro_batcher.event(captured, step.phase, step.batch_idx, parts, 1, _BY_HAND)
        micro_batcher.ask(event)
        return raise_with_advice(captured, event)

    return run_once
