"""Snapshot of the state that a step may change: random generators, buffers, metrics."""

from collections.abc import Sequence

import torch
from torch import nn

from equipoise.parallel.snapshot.buffers import Buffers
from equipoise.parallel.snapshot.global_generators import GlobalGenerators
from equipoise.parallel.snapshot.metrics import Metrics

__all__ = ["StepSnapshot"]


class StepSnapshot:
    """Snapshot of the state that a step may change beside parameters and gradients.

    While recovery is armed every step takes one, so it must cost little: the global generators are read only if they
    have moved, and buffers are copied in one operation.

    Args:
        module: The user's module, on its device.
        devices: The devices on which it is computed.

    Example:
        >>> layer = nn.BatchNorm1d(2)
        >>> snapshot = StepSnapshot(layer, [torch.device("cpu")])
        >>> snapshot.mark()
        >>> _ = layer(torch.rand(3, 2))
        >>> snapshot.restore()
        >>> layer.running_mean
        tensor([0., 0.])
    """

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        self._parts = (GlobalGenerators(devices), Buffers(module), Metrics(module))

    def mark(self) -> None:
        """Note the present state."""
        for part in self._parts:
            part.mark()

    def restore(self) -> None:
        """Restore the state at the last mark."""
        for part in self._parts:
            part.restore()
