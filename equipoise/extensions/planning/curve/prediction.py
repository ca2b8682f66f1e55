"""The memory of a step as a function of its batch size: one curve, or straight lines between steps of several sizes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from equipoise.extensions.common.device_loads import WHOLE_STEP, DeviceLoad, Part, PlannedPart, StepFacts
from equipoise.extensions.planning.curve.curve import MemoryCurve
from equipoise.extensions.planning.curve.parts import PredictedPeak
from equipoise.extensions.planning.curve.search import largest_size

__all__ = ["MemoryPrediction"]


@dataclass(frozen=True, kw_only=True)
class MemoryPrediction:
    """Predicted memory of a training step.

    Attributes:
        batch_size: Samples of the batch that was given.
        curves: The memory of one device as a function of the batch size: one curve, or several with a size each, the
            smallest first. Between these sizes lie straight lines.
        method: "traced" (two traces without memory), "traced at several sizes" (the step differs from size to size, so
            values between them are estimates) or "measured" (real steps with parts of the batch).
        notes: Guesses that were made, with the lines of the user's code.
        accumulate_grad_batches: Batches of an accumulation window. Default: 1.
        of_part: Predicts the step of a part of each sample; see `PlannedLoads`. Default: None, it was not traced.
    """

    batch_size: int
    curves: Sequence[MemoryCurve]
    method: Literal["traced", "traced at several sizes", "measured"]
    notes: Sequence[str] = ()
    accumulate_grad_batches: int = 1
    of_part: Callable[[Callable[[Any], PlannedPart]], "MemoryPrediction"] | None = field(default=None, repr=False)

    def peak(
        self,
        batch_size: int | None = None,
        load: DeviceLoad = WHOLE_STEP,
        rounding: int = 1,
    ) -> PredictedPeak:
        """Return the peak of a device at a batch size.

        Args:
            batch_size: Samples of a batch. Default: those of the given one.
            load: The part of the step that the device has; see `device_loads`. Default: all of it.
            rounding: Bytes to which an allocator rounds each storage up, 512 on CUDA. Default: 1.
        """
        if batch_size is None:
            batch_size = self.batch_size
        if len(self.curves) == 1:
            return self.curves[0].peak(batch_size, load, rounding)
        samples = load.samples(batch_size)
        if load.work is not None:
            samples = load.work.samples(batch_size)
        # 1. The two sizes around it, or the nearest two.
        upper = 1
        while upper < len(self.curves) - 1 and self.curves[upper].span.second < samples:
            upper += 1
        low = self.curves[upper - 1]
        high = self.curves[upper]

        # 2. The line through them.
        distance = high.span.second - low.span.second
        position = (samples - low.span.second) / distance
        first = low.peak(batch_size, load, rounding)
        second = high.peak(batch_size, load, rounding)
        phases = _between(first.phases, second.phases, position)
        parts: dict[Part, int] = _between(first.parts, second.parts, position)
        phase = max(phases, key=lambda name: phases[name])
        return PredictedPeak(
            nbytes=phases[phase],
            phase=phase,
            parts=parts,
            phases=phases,
        )

    def largest_batch(
        self,
        limit: int,
        load: DeviceLoad = WHOLE_STEP,
        rounding: int = 1,
    ) -> int:
        """Return the largest batch size that fits; 0 if none does.

        Args:
            limit: Memory of the device in bytes.
            load: The part of the step that the device has. Default: all of it.
            rounding: Bytes to which an allocator rounds each storage up. Default: 1.

        Returns:
            The number of samples, at most 16.8 million.
        """

        def fits(size: int) -> bool:
            return self.peak(size, load, rounding).nbytes <= limit

        return largest_size(fits, self.curves[-1].span.second)

    @property
    def facts(self) -> StepFacts:
        """Facts of the step that hold for every batch size."""
        totals = self.curves[-1].totals
        return StepFacts(
            parameters=totals.get("parameter", 0),
            gradients=totals.get("gradient", 0),
            optimizer_state=totals.get("optimizer state", 0),
            buffers=totals.get("buffer", 0),
            accumulates=self.accumulate_grad_batches > 1,
        )


def _between(first: Mapping[Any, int], second: Mapping[Any, int], position: float) -> dict[Any, int]:
    """Return values on the lines between those of two mappings; a missing one is 0."""
    result = {}
    keys = [*first, *second]
    for key in dict.fromkeys(keys):
        begin = first.get(key, 0)
        end = second.get(key, 0)
        # Behind the last sizes, a line may lead below 0.
        result[key] = max(0, round(begin + (end - begin) * position))
    return result
