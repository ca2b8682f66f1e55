"""Micro-batching after an out-of-memory error: split a batch, and learn sizes that fit."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor

from equipoise.callbacks.callback import Callback
from equipoise.errors import ConfigurationError, StepError
from equipoise.memory.devices import empty_cache, free_memory
from equipoise.memory.footprint import footprint_of
from equipoise.memory.out_of_memory import OutOfMemoryEvent, Phase, Split, device_of, free_bytes, requested_bytes
from equipoise.parallel.batches.gathering import PartialOutputs
from equipoise.parallel.batches.splitting import Splitter
from equipoise.parallel.step_protocols import StepResult
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.hooks.hooks import overrides
from equipoise.trainer.recovery.captured_error import CapturedError
from equipoise.tree import entries_of

if TYPE_CHECKING:
    from equipoise.trainer.runtime.run_context import RunContext

__all__ = ["Measure", "MicroBatcher", "is_armed"]

_MOST_AGAIN = 5  # times that the same is tried: a callback may wait for memory, but not for ever
Shapes = tuple[tuple[int, ...], ...]


def is_armed(context: "RunContext") -> bool:
    """Whether a callback decides what happens when memory runs out."""
    return any(overrides(callback, "on_out_of_memory", Callback) for callback in context.hooks.callbacks)


class Measure(NamedTuple):
    """What a batch has in common with others, and its number of samples."""

    kind: Shapes
    size: int


@dataclass
class _Size:
    """How many samples fit at once, for batches of one kind."""

    samples: int
    grow_after: int
    good: int = 0
    before: int = 0  # the size that is known to fit, while a larger one is tried


class MicroBatcher:
    """Computes batches in as many parts as they need, and learns how many that is.

    Args:
        context: The run.
        compute: Computes a batch, or a part of one: `compute(parts, is_last_part)`.
        name: Whose sizes are learned. Default: "training".
    """

    def __init__(
        self, context: "RunContext", compute: Callable[[Sequence[Any], bool], Any], name: str = "training"
    ) -> None:
        self.context, self.compute = context, compute
        self.strategy: Strategy = context.strategy
        self.splitter = Splitter(context.module, context.strategy.dim)
        self._again = 0  # answers in a row that did not ask for smaller parts
        self._sizes: dict[Shapes, _Size] = context.fitting.setdefault(name, {})

    def _kind(self, parts: Sequence[Any]) -> Shapes:
        """What batches have in common that need as much memory for each sample."""
        shapes = [tuple(tensor.shape) for part in parts for _, tensor in entries_of(part)]
        dim = self.strategy.dim
        return tuple(shape[:dim] + shape[dim + 1 :] for shape in shapes)

    def count(self, parts: Sequence[Any]) -> int:
        """In how many parts a batch is to be computed, by what is known of its kind."""
        if not self._sizes or (known := self._sizes.get(self._kind(parts))) is None:
            return 1
        return -(-self.size(parts) // known.samples)

    def size(self, parts: Sequence[Any]) -> int:
        """The number of samples of a batch that must be cut."""
        return sum(self.splitter.size_to_cut(part) for part in parts)

    def most(self, parts: Sequence[Any]) -> tuple[int | None, int, str]:
        """A batch's number of samples, in how many parts it can be computed at most, and why not in more."""
        if not parts:
            return None, 1, ""
        try:
            sizes = [self.splitter.size_to_cut(part) for part in parts]
        except StepError as error:
            return None, 1, str(error)
        return sum(sizes), max(sizes), ""

    def measure(self, parts: Sequence[Any]) -> "Measure | None":
        """Return the kind and size of a batch, before a step takes something out of it; None if no size is known."""
        if not self._sizes:
            return None
        kind = self._kind(parts)
        return Measure(kind, self.size(parts)) if kind in self._sizes else None

    def good(self, measured: "Measure | None") -> None:
        """Note that a batch went well; after enough of them a larger size is tried.

        Args:
            measured: What `measure` returned for the batch.
        """
        self._again = 0
        if measured is not None and (known := self._sizes.get(measured.kind)) is not None:
            known.good += 1
            if known.before and measured.size > known.before:
                known.before = 0  # the larger size fits
            if not known.before and known.grow_after and known.good >= known.grow_after:
                known.before, known.samples, known.good = known.samples, 2 * known.samples, 0

    def failed(self, parts: Sequence[Any], split: Split) -> None:
        """A batch is to be computed in more parts."""
        kind, samples = self._kind(parts), max(1, -(-self.size(parts) // split.parts))
        known = self._sizes.get(kind)
        if known is None:
            self._sizes[kind] = _Size(samples, split.grow_after)
            return
        if known.before:
            known.grow_after *= 2
        known.samples, known.good, known.before = known.before or samples, 0, 0

    def run(self, step: Any, parts: Sequence[Any], count: int) -> StepResult:
        """Computes a batch in so many parts.

        Args:
            step: The user's step.
            parts: The batch, as the strategy has placed it.
            count: In how many parts.
        """
        pieces = self.strategy.recovery.split(parts, count, self.splitter)
        sizes = [self.size(piece) for piece in pieces]  # before a step takes something out of them
        results: list[StepResult] = []
        device, dim = self.strategy.root_device, self.strategy.dim
        step.in_micro_batches = True
        try:
            for index, piece in enumerate(pieces):
                last = index + 1 == len(pieces)
                result, logged = step.capture_logs(lambda piece=piece, last=last: self.compute(piece, last))
                results.append(_detached(result)._replace(logged=logged))
                del result
            bare = [result._replace(outputs=None) for result in results]
            combined: StepResult = step.merge(bare, sizes, device, dim=dim, original=lambda metric: metric)
        finally:
            step.in_micro_batches = False
        outputs = _in_order(pieces, results, sizes, device, dim)
        return combined._replace(outputs=step.finished(outputs))

    def event(
        self, failure: CapturedError, phase: Phase, batch_idx: int, parts: Sequence[Any], count: int, refusal: str = ""
    ) -> OutOfMemoryEvent:
        """An event for callbacks; the failure learns what is held.

        Args:
            failure: The error.
            phase: What ran.
            batch_idx: The number of the batch.
            parts: The batch, as the strategy has placed it.
            count: In how many parts it was computed.
            refusal: Why it cannot be done again, whatever callbacks say; empty if it can.
        """
        size, most, obstacle = self.most(parts)
        device = str(self.strategy.recovery.device_of_failure(device_of(failure.message)) or self.strategy.root_device)
        failure.held = footprint_of(self.context.module, self.context.trainer.optimizers, device)
        free = free_bytes(failure.message)
        return OutOfMemoryEvent(
            phase=phase,
            device=device,
            batch_idx=batch_idx,
            batch_size=size,
            parts=count,
            most_parts=1 if refusal else most,
            obstacle=refusal or obstacle,
            requested=requested_bytes(failure.message),
            free=free_memory(device) if free is None else free,
            message=failure.message,
            step=self.context.trainer.global_step,
            seconds=time.monotonic(),
            global_rank=self.strategy.processes.rank,
            can_repeat=not refusal,
        )

    def ask(self, event: OutOfMemoryEvent) -> Split | None:
        """What the callbacks decide; None: raise."""
        for callback in self.context.hooks.callbacks:
            if overrides(callback, "on_out_of_memory", Callback):
                answer = callback.on_out_of_memory(  # type: ignore[attr-defined]
                    self.context.trainer, self.context.module, event
                )
                if answer is not None:
                    split = _split(answer, callback)
                    self._again = self._again + 1 if 0 < split.parts <= event.parts else 0
                    return None if self._again > _MOST_AGAIN else split
        return None

    def let_go(self) -> None:
        """Frees what the failed attempt held, in cycles and in the allocator's cache."""
        gc.collect()
        empty_cache(self.strategy.devices)


def _split(answer: Any, callback: Any) -> Split:
    if isinstance(answer, Split):
        return answer
    if isinstance(answer, bool) or not isinstance(answer, int) or answer < 0:
        raise ConfigurationError(
            f"{type(callback).__name__}.on_out_of_memory returns a number of parts from 0, a Split or None, not"
            f" {answer!r}."
        )
    return Split(answer)


def _detached(result: Any) -> StepResult:
    """A result without its graph."""
    loss = None if result.loss is None else result.loss.detach()
    outputs = result.outputs
    if isinstance(outputs, PartialOutputs):
        detached = [apply_to_collection(out, Tensor, Tensor.detach) for out in outputs.outputs]
        return StepResult(loss, result.weight, replace(outputs, outputs=detached))
    return StepResult(loss, result.weight, apply_to_collection(outputs, Tensor, Tensor.detach))


def _in_order(
    pieces: Sequence[Any], results: Sequence[StepResult], sizes: Sequence[int], device: torch.device, dim: int
) -> PartialOutputs:
    """The outputs of pieces in the order of the data, where each piece holds some samples of every device."""
    entries: list[tuple[int, int, Any, int, Any]] = []
    for number, (piece, result, size) in enumerate(zip(pieces, results, sizes, strict=True)):
        outputs, weight = result.outputs, 1 if result.weight is None else result.weight
        if isinstance(outputs, PartialOutputs):
            apart = zip(piece.indices, outputs.outputs, outputs.sizes, outputs.weights, strict=True)
            entries += [(index, number, out, part_size, part_weight) for index, out, part_size, part_weight in apart]
        else:
            entries.append((0, number, outputs, size, weight))
    entries.sort(key=lambda entry: entry[:2])
    _, _, parts, part_sizes, weights = zip(*entries, strict=True)
    made = PartialOutputs(parts, part_sizes, device, dim, weights)
    made.check()
    return made
