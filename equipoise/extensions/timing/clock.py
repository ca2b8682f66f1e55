"""The clock of a fit: functions that add their duration to the seconds of a part.

A step calls four of them. Each reads the clock twice and adds to a list that exists already: 0.2 µs. The parts within
a part are subtracted when the seconds are read.
"""

from collections.abc import Callable
from time import perf_counter
from typing import Any

from equipoise.extensions.timing.device_times import DeviceTimes
from equipoise.extensions.timing.parts import Cell

__all__ = ["FIRST_STEPS", "Clock"]

# Steps that do more than others: they compile, choose kernels, start workers and allocate the optimiser's state.
FIRST_STEPS = 3


class Clock:
    """Seconds of a fit by cells. They count from the end of the first steps.

    Args:
        device_times: Follows the steps on a CUDA device; None without one.
        first_steps: Number of first steps. Default: 3.

    Attributes:
        steps: Steps so far.
        first_seconds: Duration of the first steps.
    """

    def __init__(self, device_times: DeviceTimes | None = None, first_steps: int = FIRST_STEPS) -> None:
        self.device_times = device_times
        self.first_steps = first_steps
        self.steps = 0
        self.first_seconds = 0.0
        self._begun = perf_counter()
        self._is_past_first = False
        self._cells: dict[Cell, int] = {}
        # In the order of the cells; functions add to it.
        self._seconds: list[float] = []

    @property
    def measured_steps(self) -> int:
        """Number of steps after the first ones."""
        if not self._is_past_first:
            return 0
        return self.steps - self.first_steps

    def elapsed(self) -> float:
        """Return the seconds since the end of the first steps."""
        return perf_counter() - self._begun

    def seconds(self) -> dict[Cell, float]:
        """Return the seconds of each cell since the end of the first steps."""
        return dict(zip(self._cells, self._seconds, strict=True))

    def timed(self, function: Callable[..., Any], cell: Cell) -> Callable[..., Any]:
        """Return a function that does the same and adds its duration to a cell."""
        index = self._index_of(cell)
        seconds = self._seconds
        now = perf_counter

        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = now()
            result = function(*args, **kwargs)
            seconds[index] += now() - begun
            return result

        if self.device_times is None:
            return timed
        return self.device_times.marking(timed, cell.part)

    def timed_and_counted(self, function: Callable[..., Any], cell: Cell) -> Callable[..., Any]:
        """Return the same for the function with which a step begins. It counts the steps."""
        index = self._index_of(cell)
        seconds = self._seconds
        now = perf_counter
        device_times = self.device_times
        if device_times is not None:
            function = device_times.marking(function, cell.part)

        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.steps == self.first_steps:
                self._begin_anew()
            if device_times is not None:
                device_times.begin_step()
            begun = now()
            result = function(*args, **kwargs)
            seconds[index] += now() - begun
            self.steps += 1
            return result

        return counted

    def _begin_anew(self) -> None:
        """Forget the seconds of the first steps."""
        now = perf_counter()
        self.first_seconds = now - self._begun
        self._begun = now
        self._is_past_first = True
        self._seconds[:] = [0.0] * len(self._seconds)

    def _index_of(self, cell: Cell) -> int:
        if cell not in self._cells:
            self._cells[cell] = len(self._seconds)
            self._seconds.append(0.0)
        return self._cells[cell]
