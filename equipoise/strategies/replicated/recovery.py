"""Recovery from an error of memory on one of several devices of a process."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from equipoise.parallel.batches.shares import even_sizes
from equipoise.parallel.batches.splitting import Splitter
from equipoise.parallel.replicas.device_threads import DeviceThreads
from equipoise.parallel.replicas.replicas import Replicas
from equipoise.strategies.recovery_support import RecoverySupport

__all__ = ["PlacedParts", "ReplicatedRecovery"]


class PlacedParts(tuple[Any, ...]):
    """The parts of a batch, in the order of the data.

    Attributes:
        indices: Index of the device of each part.
        sizes: Number of samples of each part.
    """

    indices: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, parts: Sequence[Any], indices: Sequence[int], sizes: Sequence[int]) -> "PlacedParts":
        """Return the parts with their devices and sizes."""
        placed = cls(parts)
        placed.indices = tuple(indices)
        placed.sizes = tuple(sizes)
        return placed


class ReplicatedRecovery(RecoverySupport):
    """Splits the part of every device, and finds the device that ran out of memory.

    Args:
        replicas: The replicas of the module.
        threads: The threads that compute the parts.
        reduce_share: Function that reduces the share of a device. It receives the index of the device, and the number
            of samples of each device in the computation that failed.

    Attributes:
        computed: Number of samples of each device in the last computation, by the index of the device.
    """

    def __init__(
        self,
        replicas: Replicas,
        threads: DeviceThreads,
        reduce_share: Callable[[int, Mapping[int, int]], None],
    ) -> None:
        self.computed: dict[int, int] = {}
        self._replicas = replicas
        self._threads = threads
        self._reduce_share = reduce_share
        # Index of the device that ran out of memory.
        self._failed: int | None = None

    def note_sizes(self, indices: Sequence[int], sizes: Sequence[int]) -> None:
        """Note the number of samples of each device in the present computation."""
        self.computed = dict(zip(indices, sizes, strict=True))

    def split(self, parts: Sequence[Any], count: int, splitter: Splitter) -> list[Sequence[Any]]:
        """Split every device's part; see `RecoverySupport.split`."""
        micro_batches = super().split(parts, count, splitter)
        if not isinstance(parts, PlacedParts):
            return micro_batches
        sizes_of_parts = [even_sizes(size, count) for size in parts.sizes]
        placed: list[Sequence[Any]] = []
        for number, samples in enumerate(micro_batches):
            # Parts of few samples are missing in the last micro-batches.
            sizes = {index: pieces[number] for index, pieces in zip(parts.indices, sizes_of_parts, strict=True)}
            present = {index: size for index, size in sizes.items() if size}
            placed.append(PlacedParts.of(samples, tuple(present), tuple(present.values())))
        return placed

    def discard(self) -> bool:
        """Discard the gradients of replicas; see `RecoverySupport.discard`."""
        self._replicas.discard_gradients()
        return False

    def device_of_failure(self, named: str | None) -> torch.device | None:
        """Return the device of the part that failed, or the one that is named; see the interface."""
        self._failed = self._find_failed(named)
        if self._failed is None:
            return super().device_of_failure(named)
        return self._threads.devices[self._failed]

    def _find_failed(self, named: str | None) -> int | None:
        failed = self._threads.failed
        if named is None:
            return failed
        same_name = [index for index, device in enumerate(self._threads.devices) if str(device) == named]
        if failed in same_name:
            return failed
        # Another device failed, or the backward, whose parts do not run in these threads.
        if len(same_name) == 1:
            return same_name[0]
        return None

    def reduce_share(self) -> None:
        """Reduce the share of the device that failed; see `RecoverySupport.reduce_share`."""
        if self._failed is not None and self._failed in self.computed:
            self._reduce_share(self._failed, self.computed)
