"""A curve through single points, for steps that do something else at every batch size."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from equipoise.extensions.planning.curve.curve import MemoryCurve
from equipoise.extensions.planning.curve.fitting import RecordedStep, fit_curve
from equipoise.extensions.planning.curve.parts import PredictedPeak
from equipoise.extensions.planning.curve.search import largest_within
from equipoise.extensions.planning.description.loads import WHOLE_STEP, DeviceLoad, Part

__all__ = ["SampledCurve", "SampledStep", "sample_of"]


class SampledStep(NamedTuple):
    """A step at one batch size.

    Attributes:
        batch_size: The batch size.
        step: The step, whose sizes are those at that batch size.
    """

    batch_size: int
    step: MemoryCurve


def sample_of(recorded: RecordedStep) -> SampledStep:
    """Return a recorded step as a point of a curve.

    Args:
        recorded: The record of the step.
    """
    return SampledStep(recorded.batch_size, fit_curve(recorded, recorded))


@dataclass(frozen=True, kw_only=True)
class SampledCurve:
    """Memory of a step as a function of its batch size, on straight lines between the sizes that ran.

    Attributes:
        points: The steps that ran, two or more, the smallest batch first.
    """

    points: Sequence[SampledStep]

    def peak(
        self,
        batch_size: int,
        load: DeviceLoad = WHOLE_STEP,
        rounding: int = 1,
    ) -> PredictedPeak:
        """Return the peak at a batch size; see `MemoryCurve.peak`."""
        samples = load.samples(batch_size)
        if load.work is not None:
            samples = load.work.samples(batch_size)
        # 1. The two points around it, or the nearest two.
        upper = 1
        while upper < len(self.points) - 1 and self.points[upper].batch_size < samples:
            upper += 1
        low = self.points[upper - 1]
        high = self.points[upper]

        # 2. The line through them.
        distance = high.batch_size - low.batch_size
        position = (samples - low.batch_size) / distance
        first = low.step.peak(batch_size, load, rounding)
        second = high.step.peak(batch_size, load, rounding)
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
        """Return the largest batch size whose peak stays within a limit; see `MemoryCurve.largest_batch`."""
        start = self.points[-1].batch_size

        def nbytes_at(size: int) -> int:
            return self.peak(size, load, rounding).nbytes

        return largest_within(limit, nbytes_at, start)

    @property
    def totals(self) -> Mapping[Any, int]:
        """Bytes that the largest step keeps to its end, by category."""
        return self.points[-1].step.totals

    def to_plain(self) -> dict[str, Any]:
        """Return the curve as values that JSON can hold."""
        points = []
        for point in self.points:
            points.append([point.batch_size, point.step.to_plain()])
        return {"points": points}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> "SampledCurve":
        """Return the curve of plain values.

        Args:
            values: The result of `to_plain`.
        """
        points = []
        for batch_size, step in values["points"]:
            points.append(SampledStep(batch_size, MemoryCurve.from_plain(step)))
        return cls(points=points)


def _between(first: Mapping[Any, int], second: Mapping[Any, int], position: float) -> dict[Any, int]:
    """Return values on the lines between those of two mappings; a missing one is 0."""
    result = {}
    keys = [*first, *second]
    for key in dict.fromkeys(keys):
        begin = first.get(key, 0)
        end = second.get(key, 0)
        # Behind the last points, a line may lead below 0.
        value = begin + (end - begin) * position
        result[key] = max(0, round(value))
    return result
