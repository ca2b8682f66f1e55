"""The part of a step that one process of a row computes, for plans of memory, which have no other processes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.extensions.fsdp.mesh.context.divided_batch import divide
from equipoise.extensions.fsdp.mesh.context.sequence_row import SequenceRow
from equipoise.extensions.fsdp.mesh.context.steps.divided_sequences import DividedSequences

__all__ = ["PlannedSequences"]


class PlannedSequences:
    """The part of a step that a process has whose row divides sequences: a `PlannedPart`.

    Args:
        size: The number of processes of the row.
        module: The user's module.
    """

    def __init__(self, size: int, module: nn.Module) -> None:
        self._module = module
        self._row = _RowWithoutOthers(size)
        self._sequences = DividedSequences(module, self._row)

    def of_batch(self, batch: Any) -> Any:
        """Return the part of a batch; see `PlannedPart`."""
        return divide(batch, self._row, self._module)

    @contextmanager
    def mode(self) -> Iterator[None]:
        """Compute a part in a `with` block; see `PlannedPart`."""
        with self._sequences.mode(draws=False):
            yield


class _RowWithoutOthers(SequenceRow):
    """The first process of a row, which receives tensors without values."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.rank = 0

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        here = tensor.detach().contiguous()
        return [torch.empty_like(here) for _ in range(self.size)]

    def reduce_scatter(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.empty_like(parts[0])

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone()

    def all_true(self, flags: Tensor) -> list[bool]:
        return [True] * flags.numel()
