"""The memory of a step as a function of its batch size, from traces that allocate nothing, or from real steps."""

from collections.abc import Callable
from typing import Any

from torch import nn

from equipoise.extensions.common.interop import fake_tensors
from equipoise.extensions.planning.curve.fitting import (
    IrregularStepError,
    RecordedStep,
    fit_curve,
    needs_confirmation,
    reproduces,
)
from equipoise.extensions.planning.curve.prediction import MemoryPrediction
from equipoise.extensions.planning.description.settings import StepSettings
from equipoise.extensions.planning.tracing.batches import size_of_batch
from equipoise.extensions.planning.tracing.obstacles import Notes, refuse_side_effects
from equipoise.extensions.planning.tracing.recording import record_step
from equipoise.extensions.planning.tracing.step import BuildOptimizer, PlannedStep

__all__ = ["measure_step", "trace_step"]

# A step that differs from size to size is traced at these multiples of the batch.
_MULTIPLES = (1, 2, 3, 4, 8)
# A step that cannot be traced runs at these parts of the batch, and at no larger one.
_PARTS = (4, 2, 1)


def trace_step(
    build: Callable[[], nn.Module],
    example: Any,
    settings: StepSettings,
    build_optimizer: BuildOptimizer | None = None,
) -> MemoryPrediction:
    """Trace a step at two batch sizes, or at several if it does something else at each of them.

    Args:
        build: Builds the module. Its parameters get no memory, however many there are.
        example: A batch.
        settings: The settings of the step.
        build_optimizer: Returns the optimiser. Default: that of `configure_optimizers`.
    """
    notes = Notes()
    batch_size = size_of_batch(example)
    with fake_tensors(notes.add):
        step = PlannedStep(build(), settings, build_optimizer)

        def record(size: int) -> RecordedStep:
            with refuse_side_effects():
                return record_step(step, example, size, settings.accumulate_grad_batches)

        # 1. Two sizes. A dimension of length 1 has rules of its own.
        first_size = max(2, batch_size)
        first = record(first_size)
        second = record(2 * first_size)
        curve = None
        try:
            curve = fit_curve(first, second)
        except IrregularStepError:
            notes.lines.append("The step does other things at other batch sizes, so values between them are estimates.")

        # 2. A third one, where a storage does not simply grow with the batch.
        if curve is not None and needs_confirmation(curve):
            third = record(3 * first_size)
            if not reproduces(curve, third):
                notes.lines.append("The step's memory follows no simple law, so values between sizes are estimates.")
                curve = None

        # 3. Single sizes, if no curve goes through these.
        if curve is not None:
            curves = [curve]
        else:
            recorded = [record(multiple * first_size) for multiple in _MULTIPLES]
            curves = [fit_curve(same, same) for same in recorded]
    return MemoryPrediction(
        batch_size=batch_size,
        curves=curves,
        method="traced at several sizes" if curve is None else "traced",
        notes=notes.lines,
        accumulate_grad_batches=settings.accumulate_grad_batches,
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
    curves = []
    with refuse_side_effects():
        for size in sizes:
            recorded = record_step(step, example, size, settings.accumulate_grad_batches)
            curves.append(fit_curve(recorded, recorded))
    return MemoryPrediction(
        batch_size=batch_size,
        curves=curves,
        method="measured",
        accumulate_grad_batches=settings.accumulate_grad_batches,
    )
