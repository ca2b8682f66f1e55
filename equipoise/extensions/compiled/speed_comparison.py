"""Compare the time of compiled and eager steps; see `Trainer(compile="auto")`."""

import time

import torch

__all__ = ["SpeedComparison"]

# Number of steps of each kind. The fastest of them counts: others were disturbed.
_ROUNDS = 5
# Share of the eager step's time that a compiled step may take at most. Less is not worth another rounding.
_WORTH = 0.97


class SpeedComparison:
    """The times of steps that are computed by the program and eagerly in turn.

    On a GPU the time of a step is that of the host or of the device, whichever is longer. The host waits for the device
    once, before the verdict.

    Args:
        device: The device of the steps.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # The time of the host, and the events around the work of a GPU.
        self._of_program: list[_Time] = []
        self._eager: list[_Time] = []

    def is_turn_of_program(self) -> bool:
        """Return True if the next step is to be computed by the program."""
        return len(self._of_program) <= len(self._eager)

    def start(self) -> "_Time":
        """Return the time of a step that begins now."""
        return _Time(self._device)

    def add(self, step: "_Time", *, by_program: bool) -> None:
        """Note that a step ends.

        Args:
            step: The result of `start`.
            by_program: Whether the program has computed it.
        """
        step.stop()
        times = self._of_program if by_program else self._eager
        times.append(step)

    def is_complete(self) -> bool:
        """Return True if there were enough steps of each kind."""
        return min(len(self._of_program), len(self._eager)) >= _ROUNDS

    def seconds(self) -> tuple[float, float]:
        """Return the shortest time of a step by the program, and of an eager step."""
        of_program = min(step.seconds() for step in self._of_program)
        eager = min(step.seconds() for step in self._eager)
        return of_program, eager

    def is_program_faster(self) -> bool:
        """Return True if the program is worth its use."""
        of_program, eager = self.seconds()
        return of_program <= _WORTH * eager


class _Time:
    """The time of one step."""

    def __init__(self, device: torch.device) -> None:
        self._end: torch.cuda.Event | None = None
        self._start: torch.cuda.Event | None = None
        self._device = device
        if device.type == "cuda":
            self._start = self._event()
        self._begin = time.perf_counter()
        self._on_host = 0.0

    def stop(self) -> None:
        """Note that the step ends."""
        self._on_host = time.perf_counter() - self._begin
        if self._device.type == "cuda":
            self._end = self._event()

    def seconds(self) -> float:
        """Return the time. On a GPU this waits for the step."""
        if self._start is None or self._end is None:
            return self._on_host
        self._end.synchronize()
        on_device: float = self._start.elapsed_time(self._end) / 1000
        return max(self._on_host, on_device)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event
