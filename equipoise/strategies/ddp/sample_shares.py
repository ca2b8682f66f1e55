"""Shares of a step's samples for each process, given or measured.

Loaders read ahead, so a cut is asked for before its step is computed, in some processes earlier than in others. Yet all
must cut a step alike. So the sizes to be measured follow from the number of the step alone, and measured shares hold
from the first step on that no process has cut yet.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from equipoise.errors import ConfigurationError
from equipoise.parallel.batches.calibration import Calibration, SimulatedDevice
from equipoise.parallel.batches.shares import DeviceTimes, are_shares, even_sizes, finish_together, sizes_by_shares
from equipoise.parallel.batches.splitting import infer_batch_size
from equipoise.parallel.step_protocols import StepResult, TrainingStep
from equipoise.strategies.ddp.loaders import why_not_by_shares

__all__ = ["ProcessShares", "check_shares"]

Gather = Callable[[Any], list[Any]]
_T = TypeVar("_T")


def check_shares(shares: Any) -> None:
    """Checks shares that were given.

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


class ProcessShares:
    """The cut of every step, the same in all processes.

    Args:
        shares: A number for each process, "auto" to measure them, or None for an even cut.
        processes: How many there are.
        rank: Which one this is.
        device: Where it computes.
        simulated: Processes whose devices are to be slower or smaller than they are, by rank.

    Attributes:
        shares: Those in use; None where the cut is even, or not measured yet.
    """

    def __init__(
        self,
        shares: Sequence[float] | Literal["auto"] | None,
        processes: int,
        rank: int,
        device: torch.device,
        simulated: Mapping[int, SimulatedDevice],
    ) -> None:
        self.measures = shares == "auto"
        self.shares = None if shares is None or isinstance(shares, str) else list(shares)
        self._processes, self._rank, self._simulated = processes, rank, simulated.get(rank)
        # Two, since what a process learns of its own memory must not change a cut that others do not know of.
        self._plan, self._own = (Calibration([device] * processes, simulated) for _ in range(2))
        self._planned: dict[int, int] = {}  # this process's samples of steps to come, by number, while it measures
        self._batch_idx: int | None = None
        self._again: int | None = None  # the step up to which a window is done again
        self._measured = self._before = self._asked = self._since = self._largest = 0

    def cut_of(self, loader: Any) -> Callable[[int, int], list[int]] | None:
        """How the steps of a training loader are cut, which is told; None: evenly.

        Args:
            loader: The loader. One that cannot be cut by shares is left alone where these are only measured.
        """
        cut = self.shares is not None or self.measures
        if self.measures and why_not_by_shares(loader):
            cut = False
        if size := getattr(loader, "batch_size", None):
            each = sizes_by_shares(size * self._processes, self.shares) if cut and self.shares else size
            rank_zero_info(
                f"A step has {size * self._processes} samples: {each} in {'the' if each != size else 'each of'}"
                f" {self._processes} processes."
            )
        return self.sizes if cut else None

    def sizes(self, size: int, step: int) -> list[int]:
        """The parts of a step.

        Args:
            size: The number of samples of all processes together.
            step: The number of the step in its epoch.
        """
        if step == 0:  # an epoch begins
            self._before, self._since = self._measured, 0
            self._planned.clear()
        self._asked, self._largest = step + 1, max(self._largest, size)
        parts = self._cut(size, step)
        if self.is_measuring or self._simulated is not None:
            self._planned[step] = parts[self._rank]
        return parts

    def _cut(self, size: int, step: int) -> list[int]:
        """Return the parts of a step of so many samples."""
        if self.shares is not None and step >= self._since:
            return sizes_by_shares(size, self.shares)
        if not self.measures or self.shares is not None or size < 4 * self._processes:
            return even_sizes(size, self._processes)
        return self._plan.sizes(size, self._before + step)

    def timed(self, step: TrainingStep) -> TrainingStep:
        """The same step, slower where that is simulated, and measured while measuring goes on."""
        if not self.is_measuring and self._simulated is None:
            return step
        return _Timed(step, self._compute)

    @property
    def is_measuring(self) -> bool:
        """Whether steps are being measured: only where `sizes` cuts them."""
        return self.measures and self.shares is None and self._largest >= 4 * self._processes

    def _compute(self, function: Callable[[], _T], part: Any, batch_idx: int) -> _T:
        planned = self._planned.pop(batch_idx, None)
        size = infer_batch_size(part)
        if size is None:
            size = planned
        if size is None:
            return function()
        device, run = self._simulated, function
        if device is not None:
            run = lambda: device.compute(function, size)  # noqa: E731
        return self._own.measured(self._rank, run, size)() if self.is_measuring else run()

    def begin_step(self, batch_idx: int, gather: Gather) -> None:
        """A step begins, or another part of it; after the last that is measured all processes agree on shares.

        Args:
            batch_idx: The number of the batch.
            gather: Returns what all processes pass to it.
        """
        if self._again is not None:  # what was measured counts once, as in the other processes
            if batch_idx < self._again:
                return
            self._again = None
        before, self._batch_idx = self._batch_idx, batch_idx
        if before in (None, batch_idx) or not self.is_measuring:
            return
        self._own.end_step(self._largest)
        self._measured += 1
        if not self._own.is_done:
            return
        told: list[tuple[DeviceTimes, int]] = gather((self._own.times[self._rank], self._asked))
        times, asked = [each for each, _ in told], [each for _, each in told]
        measured = all(each.measured for each in times)
        found = finish_together(self._largest, times) if measured else even_sizes(self._largest, self._processes)
        self.shares, self._since = [float(each) for each in found], max(asked)
        rank_zero_info(f"Measured shares of {self._processes} processes: shares={found} pins them.")

    def begin_again(self) -> None:
        """The window's steps up to the present one are done again."""
        self._again = self._batch_idx

    def take(self, shares: Sequence[float] | None) -> None:
        """Takes measured shares back, of an earlier run."""
        if self.measures and shares is not None and len(shares) == self._processes:
            self.shares = list(shares)


class _Timed:
    """A training step whose computation goes through somebody else."""

    def __init__(self, step: TrainingStep, compute: Callable[[Callable[[], StepResult], Any, int], StepResult]) -> None:
        self._step, self._compute = step, compute

    def __call__(self, part: Any) -> StepResult:
        return self._compute(lambda: self._step(part), part, self._step.batch_idx)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)
