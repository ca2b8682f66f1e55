"""The peak of one device with its part of a recorded step."""

import numpy as np

from equipoise.extensions.common.device_loads import DeviceLoad
from equipoise.extensions.planning.peaks.gathering import gathered
from equipoise.extensions.planning.peaks.recorded_step import RecordedStep
from equipoise.extensions.planning.peaks.replay import PredictedPeak, Replay, numbers_of
from equipoise.extensions.planning.peaks.stages import StagesOfStep

__all__ = ["device_peak", "samples_at_once"]


def samples_at_once(load: DeviceLoad, batch_size: int) -> int:
    """Return the samples that a device computes at once of a batch, which are those of the step to replay.

    A device without samples is planned with one.
    """
    if load.work is not None:
        return load.work.samples(batch_size)
    return max(1, load.samples(batch_size))


def device_peak(step: RecordedStep, load: DeviceLoad, micro_batches: int, rounding: int) -> PredictedPeak:
    """Return the peak of a device.

    Args:
        step: The step with the samples that the device computes at once; see `samples_at_once`.
        load: The part of the step that the device has.
        micro_batches: Number of micro-batches in the stages of a pipeline.
        rounding: Bytes to which an allocator rounds each storage up.
    """
    # 1. The stages of a pipeline repeat what they have of the step.
    work = load.work
    if work is not None:
        stages = StagesOfStep(step, rounding, work.stages, work.cut_before)
        return stages.peak(micro_batches, work.actions(micro_batches), copies_inputs=work.copies_inputs)

    # 2. The events of the step. Storage n has the events n + 1 and -(n + 1).
    nbytes = np.array([holder.nbytes for holder in step.holders], dtype=np.int64)
    signed = np.array(step.events, dtype=np.int64)
    holders = np.abs(signed) - 1
    # Rounded up.
    changes = np.sign(signed) * (-(-nbytes // rounding) * rounding)[holders]
    parts = numbers_of([holder.category for holder in step.holders])[holders]

    # 3. Weights that are gathered among them.
    starts = step.phases
    if load.units:
        gathering = gathered(step, load.units, load.factor("gradient", "backward"))
        parts, changes, starts = gathering.among(parts, changes, starts)
    return Replay(parts, changes, starts, load).peak()
