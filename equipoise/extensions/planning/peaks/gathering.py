"""Sharded weights that are gathered and freed in the course of a recorded step, as torch's `fully_shard` does it.

    forward    a unit is gathered into a buffer, from which its weights are copied; they are freed after it, and the
               buffer when the next unit has its weights
    backward   the buffer of the next unit is filled while one computes; whole gradients are copied into the input of a
               sum over all processes, which lives until that of the next unit

The weights of the root are whole from the beginning of a forward to the end of its backward.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from equipoise.extensions.common.device_loads import GatheredUnit
from equipoise.extensions.planning.peaks.recorded_step import PhaseStart, RecordedStep
from equipoise.extensions.planning.peaks.replay import Integers, numbers_of

__all__ = ["Gathering", "gathered"]

# The name of the root, and its parameters where it has none.
_ROOT = ""
_COMPUTED = ("activation", "temporary")


class Gathering(NamedTuple):
    """Memory that comes and goes beside the events of a step.

    Attributes:
        positions: The number of events before each change, in order.
        nbytes: Bytes of each change, negative for a release.
        before_phases: The number of changes before each phase of the step.
    """

    positions: Sequence[int]
    nbytes: Sequence[int]
    before_phases: Sequence[int]

    def among(
        self,
        parts: Integers,
        changes: Integers,
        starts: Sequence[PhaseStart],
    ) -> tuple[Integers, Integers, list[PhaseStart]]:
        """Return the events of a step with these changes among them.

        Args:
            parts: The number of the part of each event.
            changes: Bytes of each event.
            starts: The beginnings of the phases, in order.
        """
        (copy,) = numbers_of(["copy"])
        moved = []
        for start, earlier in zip(starts, self.before_phases, strict=True):
            moved.append(PhaseStart(start.phase, start.event + earlier))
        return (
            np.insert(parts, self.positions, copy),
            np.insert(changes, self.positions, self.nbytes),
            moved,
        )


def gathered(step: RecordedStep, units: Sequence[GatheredUnit], share: float) -> Gathering:
    """Return what gathering needs beside a step.

    Args:
        step: The step.
        units: The units, the root last.
        share: The share of each gradient that a process keeps.
    """
    walk = _Walk(units, share)
    before_phases = []
    for number, start in enumerate(step.phases):
        before_phases.append(len(walk.positions))
        walk.position = start.event
        is_backward = start.phase == "backward"
        walk.begin(start.phase)
        for event in step.events_of(number):
            holder = step.holders[abs(event) - 1]
            if event > 0 and holder.category in _COMPUTED:
                walk.enter(holder.module)
            elif event > 0 and is_backward and holder.category == "gradient":
                walk.add_gradient(holder.module, holder.nbytes)
            walk.position += 1
        walk.end()
    return Gathering(walk.positions, walk.nbytes, before_phases)


class _Walk:
    """A walk through the modules of a step.

    Args:
        units: The units, the root last.
        share: The share of each gradient that a process keeps.

    Attributes:
        position: The number of events so far.
        positions: Those before each change.
        nbytes: Bytes of each change.
    """

    def __init__(self, units: Sequence[GatheredUnit], share: float) -> None:
        self.position = 0
        self.positions: list[int] = []
        self.nbytes: list[int] = []
        self._units = {unit.name: unit for unit in units}
        self._share = share
        self._current = _ROOT
        self._is_backward = False
        # Units in the order of their forwards, of which a backward takes the last one.
        self._called: list[str] = []
        # Bytes of the buffer into which the last unit was gathered, of the input of the last sum, and of whole
        # gradients by unit.
        self._buffer = 0
        self._summed = 0
        self._gradients: dict[str, int] = defaultdict(int)

    def begin(self, phase: str) -> None:
        """Begin a phase."""
        self._is_backward = phase == "backward"
        root = self._units[_ROOT].nbytes
        if phase == "forward":
            self._fill_buffer(root)
            self._change(root)
        elif self._is_backward:
            self._fill_buffer(self._next())

    def end(self) -> None:
        """End the phase."""
        self.enter(_ROOT)
        self._fill_buffer(0)
        if self._is_backward:
            self._change(-self._units[_ROOT].nbytes)
            for name in list(self._gradients):
                self._sum_gradients(name)
            self._change(-self._summed)
            self._summed = 0
            self._called.clear()

    def enter(self, module: str) -> None:
        """Continue with a module: gather its unit, and free the one before."""
        name = self._unit_of(module)
        if name == self._current:
            return
        before = self._current
        self._current = name
        if before != _ROOT:
            self._change(-self._units[before].nbytes)
            if self._is_backward:
                self._sum_gradients(before)
        if name == _ROOT:
            return
        nbytes = self._units[name].nbytes
        if not self._is_backward:
            self._called.append(name)
            # The buffer of the unit before lives until this one has its weights.
            self._change(nbytes)
            self._change(nbytes)
            self._change(-self._buffer)
            self._buffer = nbytes
            return
        self._change(nbytes)
        if name in self._called:
            while self._called.pop() != name:
                pass
        self._fill_buffer(self._next())

    def add_gradient(self, module: str, nbytes: int) -> None:
        """Add what a process holds of a whole gradient beside its share. A first layer computes nothing else."""
        self.enter(module)
        self._gradients[self._unit_of(module)] += nbytes
        self._change(self._beside_share(nbytes))

    def _sum_gradients(self, name: str) -> None:
        """Copy the gradients of a unit into the input of a sum, and free them."""
        whole = self._gradients.pop(name, 0)
        self._change(-self._summed)
        self._summed = self._units[name].gradients
        # In a later backward of a window, the gradients of the step are sums already, and not in its record.
        missing = max(0, self._summed - whole)
        self._change(self._summed)
        self._change(missing)
        self._change(-missing)
        self._change(-self._beside_share(whole))

    def _beside_share(self, nbytes: int) -> int:
        """Return the bytes of gradients that a process gives away in a sum."""
        return round((1 - self._share) * nbytes)

    def _next(self) -> int:
        """Return the bytes of the unit whose backward comes next."""
        if not self._called:
            return 0
        return self._units[self._called[-1]].nbytes

    def _fill_buffer(self, nbytes: int) -> None:
        self._change(-self._buffer)
        self._change(nbytes)
        self._buffer = nbytes

    def _unit_of(self, module: str) -> str:
        name = module
        while name and name not in self._units:
            name = name.rpartition(".")[0]
        return name

    def _change(self, nbytes: int) -> None:
        if nbytes:
            self.positions.append(self.position)
            self.nbytes.append(nbytes)
