"""Times of a CUDA device, by events in one step of many. They are read when the device has passed them."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from equipoise.extensions.timing.parts import BACKWARD, COPYING, DATA, FORWARD, REST, STEP

__all__ = ["DeviceTimes"]

# A prime, so that the steps are not always the same part of an accumulation window.
_EVERY = 47
_BEGIN = "begin"
# The parts of a step in order. An event is recorded at the end of each.
_PARTS = (DATA, COPYING, FORWARD, BACKWARD, STEP, REST)


class DeviceTimes:
    """The time that a device spends from border to border of a step.

    The host runs ahead of the device, so its own times are those of launching kernels. Events tell when the device
    itself passes a border. Between the events before and after the reading of a batch it is idle only if its queue is
    empty.

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
        """End the previous step, and record this one if it is its turn and the last record is read."""
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

        # `forward_backward` (FORWARD) calls `backward` (BACKWARD): the forward ends where the backward begins.
        def marked(*args: Any, **kwargs: Any) -> Any:
            if self._is_recording and part == BACKWARD:
                self._record(FORWARD)
            result = function(*args, **kwargs)
            if self._is_recording:
                self._record_end(part)
            return result

        return marked

    def read(self) -> bool:
        """Add the last record to `seconds`; return False while the device has not passed it.

        A record that is not complete is dropped. So is one of a step in parts, such as micro-batches, which passes
        borders again.
        """
        is_complete = self._passed[-1:] == [REST] and len(set(self._passed)) == len(self._passed)
        if is_complete:
            if not self._events[REST].query():  # type: ignore[no-untyped-call]
                return False
            for begin, end in pairwise(self._passed):
                self.seconds[end] += self._events[begin].elapsed_time(self._events[end]) / 1000
        self._passed.clear()
        return True

    def _record_end(self, part: str) -> None:
        if part != FORWARD:
            self._record(part)
        elif BACKWARD not in self._passed:
            # Compiled or captured: there is no border within. The whole counts as the backward, and `RunTimes` shows
            # forward and backward as one.
            self._record(BACKWARD)

    def _record(self, border: str) -> None:
        self._events[border].record()
        self._passed.append(border)


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
