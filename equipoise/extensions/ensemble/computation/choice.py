"""The choice between members side by side and members one by one: by the user, or by measuring the first steps.

Both compute the same, so the steps that are measured count as any others.
"""

import time
from collections.abc import Callable
from typing import Literal, TypeVar

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

__all__ = ["Choice", "Mode"]

Mode = Literal["auto", "together", "one_by_one"]

T = TypeVar("T")

# Steps of each way that are timed, in turn. Their minima count, since other work on the machine only adds time.
_TIMED_STEPS = 4


class Choice:
    """Says for each step in which way it is computed.

    Args:
        mode: "together", "one_by_one", or "auto" to measure.
        device: The device, for which a measurement waits.

    Attributes:
        together: The way of the present step.
        is_made: True if nothing is measured any more.
        watches_draws: True if the present step must not draw random numbers to be computed side by side.
    """

    def __init__(self, mode: Mode, device: torch.device) -> None:
        self._device = device
        self._times: dict[bool, list[float]] = {True: [], False: []}
        self._step = 0
        self.is_made = mode != "auto"
        self._together_later = mode == "together"
        # The first step is computed one by one: it may fill caches, and shows whether a step draws random numbers.
        self.together = False
        self.watches_draws = not self.is_made

    def run(self, function: Callable[[], T]) -> T:
        """Run a step in the present way, and choose the way of the next one."""
        if self.is_made:
            result = function()
            self.together = self._together_later
            return result
        # The first step of each way is not timed.
        begin = self._now()
        result = function()
        seconds = self._now() - begin
        if self._step > 1:
            self._times[self.together].append(seconds)
        self._step += 1
        self.watches_draws = False
        if not self.is_made:
            self._choose()
        return result

    def settle(self, *, together: bool, reason: str) -> None:
        """Make the choice without further measurements.

        Args:
            together: Whether members are computed side by side.
            reason: The reason, for the message.
        """
        self.is_made = True
        self.together = together
        self._together_later = together
        self.watches_draws = False
        way = "side by side" if together else "one by one"
        rank_zero_info(f"The ensemble's members are trained {way}: {reason}.")

    def _choose(self) -> None:
        """Take the other way in the next step, or the quicker one after the last measurement."""
        if min(map(len, self._times.values())) < _TIMED_STEPS:
            self.together = not self.together
            return
        together = 1000 * min(self._times[True])
        one_by_one = 1000 * min(self._times[False])
        reason = f"{together:.2f} ms for a step of all members side by side, {one_by_one:.2f} ms one by one"
        self.settle(together=together < one_by_one, reason=reason)

    def _now(self) -> float:
        """Return the time at which the device has done its work."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
