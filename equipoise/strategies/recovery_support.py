"""Split a batch into micro-batches and repeat a step after an out-of-memory error: the strategy's part."""

from collections.abc import Sequence
from typing import Any

import torch

from equipoise.parallel.batches.splitting import Splitter

__all__ = ["RecoverySupport"]


class RecoverySupport:
    """Splits batches that do not fit, and prepares the devices for another attempt.

    The trainer calls `enable` before the first step. When memory runs out, it asks `why_not` and `device_of_failure`,
    restores the state of the step, calls `discard` and `reduce_share`, and computes the micro-batches of `split`.
    This class is for strategies without state of their own; others override what differs.
    """

    def enable(self) -> None:
        """Prepare for steps that are repeated; called before the first step."""

    def why_not(self, *, training: bool, leave_out: bool) -> str:
        """Return why a step that ran out of memory cannot be repeated, or left out; empty if it can.

        Args:
            training: Whether the step trains.
            leave_out: Whether the batch is to be left out.
        """
        return ""

    def device_of_failure(self, named: str | None) -> torch.device | None:
        """Return the device that ran out of memory in the last computation; None if unknown.

        Args:
            named: The device in the allocator's message; None if the message names none.
        """
        if named is None:
            return None
        return torch.device(named)

    def discard(self) -> bool:
        """Discard gradients of a failed attempt, except those in the module's own parameters.

        Returns:
            Whether other processes have received some of them already. The next attempt then completes them.
        """
        return False

    def reduce_share(self) -> None:
        """Reduce the share of the failed device from now on, where batches are shared out unequally.

        Called in training, after `device_of_failure`. The present batch keeps its parts.
        """

    def split(self, parts: Sequence[Any], count: int, splitter: Splitter) -> list[Sequence[Any]]:
        """Split a placed batch into micro-batches, because it does not fit into memory as a whole.

        Args:
            parts: The parts, one for each computation, as the strategy has placed them.
            count: The number of micro-batches, at most as many as the largest part has samples.
            splitter: The splitter of batches.

        Returns:
            The micro-batches, each a sequence of parts like `parts`. The last ones lack parts of few samples.
        """
        from equipoise.parallel.batches.shares import even_sizes

        # The first micro-batch takes a piece of every part, and so on. Some parts have too few samples for all.
        micro_batches: list[list[Any]] = [[] for _ in range(count)]
        for part in parts:
            sizes = [size for size in even_sizes(splitter.size_to_cut(part), count) if size]
            for micro_batch, samples in zip(micro_batches, splitter.parts(part, sizes), strict=False):
                micro_batch.append(samples)
        return [tuple(micro_batch) for micro_batch in micro_batches if micro_batch]
