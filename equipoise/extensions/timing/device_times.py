"""Times of a CUDA device, by events in one step of many. They are read when the device has passed them."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from equipoise.extensions.timing.parts import (
    BACKWARD,
    COPYING,
    DATA,
    FORWARD,
    REST,
    STEP,
)

__all__ = ["DeviceTimes"]

# A prime, so that the steps are not always the same part of an accumulation window.
_EVERY = 47
_BEGIN = ""
# The parts of a step in order. An event is recorded at the end of each.
_PARTS = (DATA, COPYING, FORWARD, BACKWARD, STEP, REST)


class DeviceTimes:
    """The time that a device spends from border to border of a step.

    The host is ahead of a device, so its own times tell how long it takes to start the work. Between an event before
    the reading of a batch and one after it a device waits only if it has nothing left to do.

    Not run on a GPU.

    Attributes:
        seconds: Seconds of the device by parts, over all steps that were read.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(_PARTS, 0.0)
        self._events = {name: _new_event() for name in (_BEGIN, *_PARTS)}
        # The borders that the present step has passed, in order.
        self._passed: list[str] = []
        self._is_recording = False
        self._step = 0

    def begin_step(self) -> None:
        """End the step before, and record this one if it is its turn and the last record was read."""
        if self._is_recording:
            self._record(REST)
            self._is_recording = False
        self._step += 1
        if self._step % _EVERY == 0 and self.read():
            self._is_recording = True
            self._record(_BEGIN)

    def leave_out(self) -> None:
        """Forget the present step: a validation follows it."""
        self._is_recording = False
        self._passed.clear()

    def marking(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Return a function that does the same and records the end of a part; others are returned as they are."""
        if part not in _PARTS:
            return function

        def marked(*args: Any, **kwargs: Any) -> Any:
            if part == BACKWARD and self._is_recording:
                self._record(FORWARD)
            result = function(*args, **kwargs)
            # The call of the forward contains the backward.
            if self._is_recording and part != FORWARD:
                self._record(part)
            elif self._is_recording and BACKWARD not in self._passed:
                self._record(BACKWARD)
            return result

        return marked

    def read(self) -> bool:
        """Read the last record, without waiting for the device; return False if it has not passed it."""
        passed = self._passed
        # A step in parts, such as micro-batches, passes a border again.
        is_complete = passed[-1:] == [REST] and len(set(passed)) == len(passed)
        if is_complete:
            if not self._events[REST].query():  # type: ignore[no-untyped-call]
                return False
            for begin, end in pairwise(passed):
                self.seconds[end] += self._events[begin].elapsed_time(self._events[end]) / 1000
        passed.clear()
        return True

    def _record(self, border: str) -> None:
        self._events[border].record()
        self._passed.append(border)


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
