"""The memory of a step with any batch size, from traces that allocate nothing, or from real steps."""

from collections.abc import Callable
from typing import Any

from torch import nn

from equipoise.errors import ConfigurationError
from equipoise.extensions.common.interop import FakeTensors
from equipoise.extensions.planning.description.settings import StepSettings
from equipoise.extensions.planning.peaks.memory_prediction import MemoryPrediction
from equipoise.extensions.planning.peaks.recorded_step import RecordedStep
from equipoise.extensions.planning.tracing.batches import size_of_batch
from equipoise.extensions.planning.tracing.obstacles import Notes, reason_of, refuse_side_effects
from equipoise.extensions.planning.tracing.recording import record_step
from equipoise.extensions.planning.tracing.step import BuildOptimizer, PlannedStep

__all__ = ["measure_step", "trace_step"]

# A step that cannot be traced runs at these parts of the batch, and at no larger one.
_PARTS = (4, 2, 1)


def trace_step(
    build: Callable[[], nn.Module],
    example: Any,
    settings: StepSettings,
    build_optimizer: BuildOptimizer | None = None,
    samples: int | None = None,
) -> MemoryPrediction:
    """Trace a step, now and whenever the prediction needs another batch size.

    Args:
        build: Builds the module. Its parameters get no memory, however many there are.
        example: A batch.
        settings: The settings of the step.
        build_optimizer: Returns the optimiser. Default: that of `configure_optimizers`.
        samples: Samples of the first traced step. Default: those of the batch.
    """
    notes = Notes()
    tensors = FakeTensors(notes.add)
    with tensors.active():
        step = PlannedStep(build(), settings, build_optimizer)

    def record(size: int) -> RecordedStep:
        with tensors.active(), refuse_side_effects():
            return record_step(step, example, size, settings.accumulate_grad_batches)

    def record_another(size: int) -> RecordedStep:
        try:
            return record(size)
        except Exception as error:
            raise ConfigurationError(f"a step with {size} samples fails: {reason_of(error)}") from error

    batch_size = size_of_batch(example)
    if samples is None:
        samples = batch_size
    return MemoryPrediction(
        batch_size=batch_size,
        steps={samples: record(samples)},
        method="traced",
        notes=notes.lines,
        accumulate_grad_batches=settings.accumulate_grad_batches,
        trace=record_another,
    )


def measure_step(
    build: Callable[[], nn.Module],
    example: Any,
    settings: StepSettings,
    build_optimizer: BuildOptimizer | None = None,
) -> MemoryPrediction:
    """Run real steps with parts of a batch, up to the whole of it, and record their memory.

    Args:
        build: Builds the module.
        example: A batch.
        settings: The settings of the step.
        build_optimizer: Returns the optimiser. Default: that of `configure_optimizers`.
    """
    batch_size = size_of_batch(example)
    sizes = sorted({max(1, batch_size // part) for part in _PARTS})
    if len(sizes) == 1:
        sizes.append(2 * sizes[0])
    step = PlannedStep(build(), settings, build_optimizer)
    with refuse_side_effects():
        steps = {size: record_step(step, example, size, settings.accumulate_grad_batches) for size in sizes}
    return MemoryPrediction(
        batch_size=batch_size,
        steps=steps,
        method="measured",
        accumulate_grad_batches=settings.accumulate_grad_batches,
    )
