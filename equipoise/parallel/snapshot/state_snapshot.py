"""Snapshots of state, of chosen parts: random generators, buffers, metrics, attributes, contents of containers."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from equipoise.parallel.snapshot.buffers import Buffers
from equipoise.parallel.snapshot.global_generators import GlobalGenerators
from equipoise.parallel.snapshot.metrics import Metrics

__all__ = ["StatePart", "StateSnapshot", "StepSnapshot"]


class StatePart(Protocol):
    """A part of the state."""

    def mark(self) -> None:
        """Note the present state."""

    def restore(self) -> None:
        """Restore the state at the last mark."""


class StateSnapshot:
    """Notes parts of the state, and restores them.

    Args:
        parts: The parts. They are noted and restored in this order.

    Example:
        >>> from equipoise.parallel.snapshot.buffers import Buffers
        >>> layer = nn.BatchNorm1d(2)
        >>> snapshot = StateSnapshot([Buffers(layer)])
        >>> snapshot.mark()
        >>> _ = layer(torch.rand(3, 2))
        >>> snapshot.restore()
        >>> layer.running_mean
        tensor([0., 0.])
    """

    def __init__(self, parts: Sequence[StatePart]) -> None:
        self._parts = parts

    def mark(self) -> None:
        """Note the present state."""
        for part in self._parts:
            part.mark()

    def restore(self) -> None:
        """Restore the state at the last mark."""
        for part in self._parts:
            part.restore()


class StepSnapshot(StateSnapshot):
    """Snapshot of the state that a step may change beside parameters and gradients.

    While recovery is armed every step takes one, so it must cost little: the global generators are read only if they
    have moved, and buffers are copied in one operation.

    Args:
        module: The user's module, on its device.
        devices: The devices on which it is computed.
    """

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        super().__init__([GlobalGenerators(devices), Buffers(module), Metrics(module)])
