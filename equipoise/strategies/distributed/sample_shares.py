"""Shares of a step's samples for each process, set by the user or measured.

Loaders read ahead, so a step is divided before it is computed, in some processes earlier than in others. Yet all
processes must divide a step alike. So the sizes to be measured follow from the number of the step alone, and measured
shares apply from the first step that no process has divided yet.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from equipoise.errors import ConfigurationError
from equipoise.parallel.batches.calibration import Calibration, SimulatedDevice
from equipoise.parallel.batches.shares import (
    DeviceTimes,
    are_shares,
    even_sizes,
    finish_together,
    sizes_by_shares,
)
from equipoise.parallel.batches.splitting import infer_batch_size
from equipoise.strategies.distributed.loaders import Sizes, step_size_of, why_not_by_shares

__all__ = ["ProcessShares", "check_shares", "check_shares_count"]

Gather = Callable[[Any], list[Any]]
# The user's setting: a number for each process, "auto" to measure, or None for even shares.
Setting = Sequence[float] | Literal["auto"] | None

# A step with fewer samples for each process is not measured.
_FEWEST_OF_PROCESS = 4

_T = TypeVar("_T")


def check_shares(shares: Any) -> None:
    """Check the user's shares.

    Raises:
        ConfigurationError: If they cannot be shares.
    """
    if shares is None or shares == "auto":
        return
    if not are_shares(shares):
        raise ConfigurationError(
            "shares must be 'auto' or a number from 0 for each process, not all of them 0, such as [2, 3]; not"
            f" {shares!r}."
        )


def check_shares_count(shares: Setting, processes: int) -> None:
    """Check that the user's shares have a number for each process.

    Raises:
        ConfigurationError: If they have not.
    """
    if shares is None or shares == "auto":
        return
    count = len(shares)
    if count != processes:
        raise ConfigurationError(
            f"shares={shares!r} are {count} numbers, but there are {processes} processes. Give a number for each."
        )


class ProcessShares:
    """The numbers of samples of each process in every step, the same in all processes.

    Args:
        shares: A number for each process, "auto" to measure them, or None for even shares.
        processes: The number of processes.
        rank: The rank of this process.
        device: The device of this process.
        simulated: Processes whose devices are to be slower or smaller than they are, by rank.

    Attributes:
        measures: Whether the user has asked to measure the shares.
        shares: The shares in use; None where they are even, or not measured yet.
    """

    def __init__(
        self,
        shares: Setting,
        processes: int,
        rank: int,
        device: torch.device,
        simulated: Mapping[int, SimulatedDevice],
    ) -> None:
        self.measures = shares == "auto"
        self.shares: list[float] | None = None
        if shares is not None and not isinstance(shares, str):
            self.shares = list(shares)
        self._processes = processes
        # Samples of the smallest step that is measured.
        self._fewest_samples = _FEWEST_OF_PROCESS * processes
        self._rank = rank
        self._simulated = simulated.get(rank)

        # One calibration plans the sizes of all processes, the other holds the measurements of this one. A process that
        # exceeds its memory must not change a plan that the others do not see change.
        devices = [device] * processes
        self._plan_of_all = Calibration(devices, simulated)
        self._measurements = Calibration(devices, simulated)
        # Numbers of measured steps, until now and until the epoch began.
        self._measured_steps = 0
        self._measured_before_epoch = 0

        # The samples of this process in steps to come, by number of the step. They are noted while steps are measured.
        self._own_sizes: dict[int, int] = {}
        # Samples of the largest step, the number of steps that are divided already, and that of the first step in the
        # epoch to which measured shares apply.
        self._largest_step = 0
        self._divided_steps = 0
        self._first_step_with_shares = 0

        # The number of the present batch.
        self._batch_idx: int | None = None
        # The step up to which a window is computed again.
        self._repeats_until: int | None = None

    def sizes_for(self, loader: Any) -> Sizes | None:
        """Return the function that divides the steps of a training loader, and log the shares; None: evenly.

        Args:
            loader: The loader. One whose steps cannot be divided unevenly stays as it is if shares are only measured.
        """
        divides = self.shares is not None or self.measures
        if self.measures and why_not_by_shares(loader):
            divides = False
        step_size = step_size_of(loader, self._processes)
        if step_size is not None:
            self._log_sizes(step_size, self.shares if divides else None)
        return self.sizes if divides else None

    def _log_sizes(self, step_size: int, shares: list[float] | None) -> None:
        processes = self._processes
        sizes = even_sizes(step_size, processes)
        if shares:
            sizes = sizes_by_shares(step_size, shares)
        text = f"{sizes} in the"
        if not shares and step_size % processes == 0:
            text = f"{sizes[0]} in each of"
        rank_zero_info(f"A step has {step_size} samples: {text} {processes} processes.")

    def sizes(self, size: int, step: int) -> list[int]:
        """Return the number of samples of each process in a step.

        Args:
            size: The number of samples of all processes together.
            step: The number of the step in its epoch.
        """
        if step == 0:
            self._measured_before_epoch = self._measured_steps
            self._first_step_with_shares = 0
            self._own_sizes.clear()
        self._divided_steps = step + 1
        self._largest_step = max(self._largest_step, size)
        sizes = self._divide(size, step)
        if self.is_measuring or self._simulated is not None:
            self._own_sizes[step] = sizes[self._rank]
        return sizes

    def _divide(self, size: int, step: int) -> list[int]:
        # 1. By shares.
        if self.shares is not None:
            if step >= self._first_step_with_shares:
                return sizes_by_shares(size, self.shares)
            return even_sizes(size, self._processes)

        # 2. Evenly, where nothing is measured.
        if not self.measures or size < self._fewest_samples:
            return even_sizes(size, self._processes)

        # 3. As planned.
        step_of_measurement = self._measured_before_epoch + step
        return self._plan_of_all.sizes(size, step_of_measurement)

    @property
    def is_measuring(self) -> bool:
        """True if steps are measured: only where `sizes` divides them."""
        if not self.measures:
            return False
        if self.shares is not None:
            return False
        return self._largest_step >= self._fewest_samples

    def run(self, function: Callable[[], _T], part: Any, batch_idx: int) -> _T:
        """Run the forward of a step, measured while shares are measured, and slowed down if the device is simulated."""
        if not self.is_measuring and self._simulated is None:
            return function()
        # 1. Find the size of the part. One that cannot be found is not measured.
        own_size = self._own_sizes.pop(batch_idx, None)
        size = infer_batch_size(part)
        if size is None:
            size = own_size
        if size is None:
            return function()

        # 2. Run the forward, slowed down and measured.
        compute = function
        if self._simulated is not None:
            compute = partial(self._simulated.compute, function, size)
        if self.is_measuring:
            compute = self._measurements.measured(self._rank, compute, size)
        return compute()

    def begin_step(self, batch_idx: int, gather: Gather) -> None:
        """Begin a step or another micro-batch of it; after the last measured step, agree on shares.

        Args:
            batch_idx: The number of the batch.
            gather: Function that returns the values that all processes pass to it.
        """
        # 1. Repeated steps are measured once, as in the other processes.
        if self._repeats_until is not None:
            if batch_idx < self._repeats_until:
                return
            self._repeats_until = None

        # 2. The first call for a batch ends the measurement of the one before.
        batch_before = self._batch_idx
        self._batch_idx = batch_idx
        begins_step = batch_before is not None and batch_before != batch_idx
        if not begins_step or not self.is_measuring:
            return
        self._measurements.end_step(self._largest_step)
        self._measured_steps += 1

        # 3. All processes have measured as many steps, so all of them come here in the same step.
        if self._measurements.is_done:
            self._agree(gather)

    def _agree(self, gather: Gather) -> None:
        # 1. Exchange the measurements.
        measurement = (self._measurements.times[self._rank], self._divided_steps)
        measurements: list[tuple[DeviceTimes, int]] = gather(measurement)
        times = [process_times for process_times, _ in measurements]
        divided_steps = [steps for _, steps in measurements]

        # 2. Find the sizes with which the processes finish together.
        processes = self._processes
        is_measured = all(process_times.measured for process_times in times)
        if is_measured:
            sizes = finish_together(self._largest_step, times)
        else:
            sizes = even_sizes(self._largest_step, processes)

        # 3. Use them from the first step on that no process has divided.
        self.shares = [float(size) for size in sizes]
        self._first_step_with_shares = max(divided_steps)
        rank_zero_info(f"Measured shares of {processes} processes: shares={sizes} pins them.")

    def begin_again(self) -> None:
        """Note that the steps of the window, up to the present one, are computed again."""
        self._repeats_until = self._batch_idx

    def restore(self, shares: Sequence[float] | None) -> None:
        """Use the measured shares of an earlier run, if there are as many processes."""
        if not self.measures or shares is None:
            return
        if len(shares) == self._processes:
            self.shares = list(shares)
