"""Recovery from an error of memory in a pipeline: more micro-batches in the same number of stages."""

from collections.abc import Sequence
from typing import Any

import torch

from equipoise.extensions.pipeline.network import StagedNetwork
from equipoise.extensions.pipeline.processes.optimizers.backend import ProcessBackend
from equipoise.parallel.batches.splitting import Splitter
from equipoise.strategies.recovery_support import RecoverySupport

__all__ = ["FinerBatch", "PipelineRecovery"]


class FinerBatch(tuple[Any, ...]):
    """A placed batch that is computed in more micro-batches than usual.

    Attributes:
        factor: Number of micro-batches in place of one.
        indices: Numbers of the micro-batches into which the batch was split. Empty before that.
    """

    factor: int = 1
    indices: Sequence[int] = ()

    @classmethod
    def of(cls, parts: Sequence[Any], factor: int) -> "FinerBatch":
        """Return a batch that is computed in a multiple of the usual number of micro-batches."""
        finer = cls(parts)
        finer.factor = factor
        return finer


class PipelineRecovery(RecoverySupport):
    """Computes a batch that does not fit in more micro-batches.

    Args:
        network: The network in stages.
        backend: Optimisers and states in other processes; None if all stages are in this process.
    """

    def __init__(self, network: StagedNetwork, backend: ProcessBackend | None) -> None:
        self._network = network
        self._backend = backend

    def enable(self) -> None:
        """Let other processes note what a window changes, too; see `RecoverySupport.enable`."""
        if self._backend is not None:
            self._backend.processes.commands.send_to_all("enable_recovery")

    def split(self, parts: Sequence[Any], count: int, splitter: Splitter) -> list[Sequence[Any]]:
        """Return the batch with more micro-batches in training, or split it in an evaluation; see the interface."""
        # An evaluation runs the network on full batches, without micro-batches of its own.
        if not torch.is_grad_enabled():
            return super().split(parts, count, splitter)
        # The batch may have been split into more micro-batches before.
        factor = count
        if isinstance(parts, FinerBatch):
            factor *= parts.factor
        return [FinerBatch.of(parts, factor)]

    def discard(self) -> bool:
        """Discard the gradients of a failed attempt in other processes; see `RecoverySupport.discard`."""
        if self._backend is not None:
            self._backend.processes.transfer.send_buffers()
            self._backend.processes.commands.send_to_all("discard")
        return False

    def device_of_failure(self, named: str | None) -> torch.device | None:
        """Return the device of the stage that failed, if the message names none; see the interface."""
        # A message without a device comes from a CPU.
        running = self._network.running
        if named is None and running is not None:
            return running.failed
        return super().device_of_failure(named)
