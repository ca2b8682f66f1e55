"""A recorded step whose storages know their sizes at any batch size: replayed, it gives the peak there."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from equipoise.extensions.common.device_loads import WHOLE_STEP, DeviceLoad, StageWork
from equipoise.extensions.planning.curve.gathering import gathered
from equipoise.extensions.planning.curve.parts import PredictedPeak, StepTrace
from equipoise.extensions.planning.curve.replay import Integers, Replay, numbers_of
from equipoise.extensions.planning.curve.sizes import Size, Span
from equipoise.extensions.planning.curve.stages import StagesOfStep
from equipoise.memory.records import Category

__all__ = ["MemoryCurve"]


@dataclass(frozen=True, kw_only=True)
class MemoryCurve(StepTrace):
    """Memory of a step as a function of its batch size.

    Attributes:
        span: The batch sizes at which the step was recorded, the same one twice if its sizes hold there alone.
        sizes: The different sizes of its storages.

    Example:
        >>> from equipoise.extensions.planning.curve.parts import Holder, PhaseStart
        >>> from equipoise.extensions.planning.curve.sizes import Growth
        >>> curve = MemoryCurve(
        ...     span=Span(2, 4),
        ...     sizes=[Size(100), Size(8, (Growth(2, 2),))],
        ...     holders=[Holder("parameter", "", 0), Holder("activation", "", 1)],
        ...     events=[1, 2, -2],
        ...     phases=[PhaseStart("forward", 0)],
        ... )
        >>> curve.peak(10).nbytes
        180
    """

    span: Span
    sizes: Sequence[Size]

    def peak(
        self,
        batch_size: int,
        load: DeviceLoad = WHOLE_STEP,
        rounding: int = 1,
    ) -> PredictedPeak:
        """Return the peak at a batch size.

        Args:
            batch_size: Samples of the whole batch, from 1.
            load: The part of the step that the device has. Default: all of it.
            rounding: Bytes to which an allocator rounds each storage up. Default: 1.
        """
        if load.work is not None:
            return self._peak_of_stages(load.work, batch_size, rounding)
        nbytes = self._nbytes(load.samples(batch_size), rounding)
        holders, signs, parts = self._arrays
        sizes = np.array(nbytes, dtype=np.int64)
        changes = signs * sizes[holders]
        starts = self.phases
        if load.units:
            share = load.factor("gradient", "backward")
            # Weights and gradients have one size for all batches.
            gathering = gathered(self, self._nbytes(self.span.first, 1), load.units, share)
            parts, changes, starts = gathering.among(parts, changes, starts)
        return Replay(parts, changes, starts, load).peak()

    def _peak_of_stages(self, work: StageWork, batch_size: int, rounding: int) -> PredictedPeak:
        """Return the peak of a device that computes stages of a pipeline."""
        # 1. The cut, which holds for all batch sizes.
        key = (work.stages, tuple(work.cut_before or ()))
        if key not in self._stages:
            nbytes = self._nbytes(self.span.first, rounding)
            self._stages[key] = StagesOfStep(self, nbytes, work.stages, work.cut_before)

        # 2. The actions with micro-batches.
        nbytes = self._nbytes(work.samples(batch_size), rounding)
        whole_batch = self._nbytes(batch_size, rounding)
        actions = work.actions(work.num_micro_batches(batch_size))
        return self._stages[key].peak(
            nbytes,
            whole_batch,
            actions,
            copies_inputs=work.copies_inputs,
        )

    def _nbytes(self, samples: int, rounding: int) -> list[int]:
        """Return the bytes of each storage with a number of samples, as an allocator rounds them up."""
        sizes = []
        for size in self.sizes:
            nbytes = size.at(samples, self.span)
            # Rounded up.
            sizes.append(-(-nbytes // rounding) * rounding)
        return [sizes[holder.size] for holder in self.holders]

    @cached_property
    def _stages(self) -> dict[Any, StagesOfStep]:
        """The step cut into stages, by their number and the names to cut before."""
        return {}

    @cached_property
    def _arrays(self) -> tuple[Integers, Integers, Integers]:
        """For each event the index of its storage, 1 for an allocation or -1 for a release, and the storage's part."""
        parts = numbers_of([holder.category for holder in self.holders])
        # Storage n has the events n + 1 and -(n + 1).
        signed = np.array(self.events, dtype=np.int64)
        holders = np.abs(signed) - 1
        return holders, np.sign(signed), parts[holders]

    @cached_property
    def totals(self) -> Mapping[Category, int]:
        """Bytes of what does not depend on the batch, by category; storages of the optimiser's step count once."""
        totals: dict[Category, int] = defaultdict(int)
        for index in _never_released(self.events):
            holder = self.holders[index]
            size = self.sizes[holder.size]
            if not size.growths:
                totals[holder.category] += size.factor
        return dict(totals)


def _never_released(events: Sequence[int]) -> list[int]:
    """Return the indices of the holders that are alive at the end."""
    alive = {}
    for event in events:
        index = abs(event) - 1
        if event > 0:
            alive[index] = True
        else:
            del alive[index]
    return list(alive)
