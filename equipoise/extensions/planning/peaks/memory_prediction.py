"""The memory of a step with any batch size: of each size a trace, or straight lines between real steps."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from equipoise.errors import ConfigurationError
from equipoise.extensions.common.device_loads import WHOLE_STEP, DeviceLoad, Part, PlannedPart, StepFacts
from equipoise.extensions.planning.peaks.device_peak import device_peak, samples_at_once
from equipoise.extensions.planning.peaks.recorded_step import RecordedStep
from equipoise.extensions.planning.peaks.replay import PredictedPeak
from equipoise.extensions.planning.peaks.search import largest_size

__all__ = ["MemoryPrediction"]

# A trace of so many events takes about 20 s.
_MOST_EVENTS = 100_000


@dataclass(frozen=True, kw_only=True)
class MemoryPrediction:
    """Predicted memory of a training step.

    Attributes:
        batch_size: Samples of the batch that was given.
        steps: The recorded steps by their numbers of samples, to which each trace adds one.
        method: "traced" (for each size a trace without memory) or "measured" (real steps with parts of the batch;
            between and beyond their sizes lie straight lines).
        notes: Guesses that were made, with the lines of the user's code.
        accumulate_grad_batches: Batches of an accumulation window. Default: 1.
        trace: Returns the step with another number of samples. Default: None, it cannot be traced.
        of_part: Predicts the step of a part of each sample; see `PlannedLoads`. Default: None, it was not traced.
    """

    batch_size: int
    steps: dict[int, RecordedStep] = field(repr=False)
    method: Literal["traced", "measured"]
    notes: list[str] = field(default_factory=list)
    accumulate_grad_batches: int = 1
    trace: Callable[[int], RecordedStep] | None = field(default=None, repr=False)
    of_part: Callable[[Callable[[Any], PlannedPart]], "MemoryPrediction"] | None = field(default=None, repr=False)
    _peaks: dict[Any, PredictedPeak] = field(default_factory=dict, init=False, repr=False)
    _failures: dict[int, ConfigurationError] = field(default_factory=dict, init=False, repr=False)

    def peak(
        self,
        batch_size: int | None = None,
        load: DeviceLoad = WHOLE_STEP,
        rounding: int = 1,
    ) -> PredictedPeak:
        """Return the peak of a device at a batch size, for which the step is traced unless it has been before.

        Args:
            batch_size: Samples of a batch. Default: those of the given one.
            load: The part of the step that the device has; see `device_loads`. Default: all of it.
            rounding: Bytes to which an allocator rounds each storage up, 512 on CUDA. Default: 1.

        Raises:
            ConfigurationError: If the step fails with this size.
        """
        if batch_size is None:
            batch_size = self.batch_size
        self._trace(samples_at_once(load, batch_size))
        return self.estimated_peak(batch_size, load, rounding)

    def estimated_peak(self, batch_size: int, load: DeviceLoad = WHOLE_STEP, rounding: int = 1) -> PredictedPeak:
        """Return the peak without a further trace: between the sizes of two steps, and beyond them, lie straight lines.

        Args:
            batch_size: Samples of a batch.
            load: See `peak`. Default: all of the step.
            rounding: See `peak`. Default: 1.
        """
        samples = samples_at_once(load, batch_size)
        micro_batches = load.work.num_micro_batches(batch_size) if load.work is not None else 1
        if samples in self.steps:
            return self._peak_of(samples, load, micro_batches, rounding)

        # 1. The two sizes around it, or the nearest two.
        if len(self.steps) < 2:
            self._trace(2 * self.batch_size)
        sizes = sorted(self.steps)
        upper = 1
        while upper < len(sizes) - 1 and sizes[upper] < samples:
            upper += 1
        low, high = sizes[upper - 1], sizes[upper]

        # 2. The line through them.
        position = (samples - low) / (high - low)
        first, second = (self._peak_of(size, load, micro_batches, rounding) for size in (low, high))
        phases = _between(first.phases, second.phases, position)
        parts: dict[Part, int] = _between(first.parts, second.parts, position)
        phase = max(phases, key=lambda name: phases[name])
        return PredictedPeak(nbytes=phases[phase], phase=phase, parts=parts, phases=phases)

    def _peak_of(self, samples: int, *arguments: Any) -> PredictedPeak:
        """Return a peak of a recorded step; see `device_peak`. It is computed once, as a search asks often."""
        key = (samples, *arguments)
        if key not in self._peaks:
            self._peaks[key] = device_peak(self.steps[samples], *arguments)
        return self._peaks[key]

    def _trace(self, samples: int) -> None:
        """Add the step with a number of samples, if it can be traced. A step that fails is traced once as well."""
        if samples in self._failures:
            raise self._failures[samples]
        if samples in self.steps or self.trace is None or not self._is_short(samples):
            return
        try:
            self.steps[samples] = self.trace(samples)
        except ConfigurationError as error:
            self._failures[samples] = error
            raise

    def _is_short(self, samples: int) -> bool:
        """Return whether a trace takes seconds. One of a step with a loop over the samples takes longer with each."""
        *_, low, high = (0, *sorted(self.steps))
        if not low:
            return True
        shorter, longer = (len(self.steps[size].events) for size in (low, high))
        return longer + (longer - shorter) * (samples - high) / (high - low) <= _MOST_EVENTS

    def largest_batch(
        self,
        limit: int,
        load: DeviceLoad = WHOLE_STEP,
        rounding: int = 1,
    ) -> int:
        """Return the largest batch size that fits; 0 if none does. A few sizes are traced for it.

        Args:
            limit: Memory of the device in bytes.
            load: The part of the step that the device has. Default: all of it.
            rounding: Bytes to which an allocator rounds each storage up. Default: 1.

        Returns:
            The number of samples, at most 16.8 million.
        """
        return largest_size(
            lambda size: self.peak(size, load, rounding).nbytes <= limit,
            lambda size: self.estimated_peak(size, load, rounding).nbytes <= limit,
            self.batch_size,
        )

    @property
    def facts(self) -> StepFacts:
        """Facts of the step that hold for every batch size."""
        totals = self.steps[max(self.steps)].totals()
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
