"""The processes that compute a batch together have the same batch: compared in some steps of each pass."""

import zlib
from typing import Any

import torch

from equipoise.errors import StepError
from equipoise.parallel.communication.object_exchange import gather_objects
from equipoise.tree import entries_of

__all__ = ["check_same_batch"]


def check_same_batch(batch: Any, processes_per_batch: int) -> None:
    """Check that a batch is the same in the processes that compute it together; all processes call this.

    Args:
        batch: The batch of this process; None without one.
        processes_per_batch: Number of successive ranks that compute each batch together.

    Raises:
        StepError: In all processes, if it differs in some.
    """
    digests = gather_objects(_digest(batch))
    for rank, digest in enumerate(digests):
        first = rank - rank % processes_per_batch
        if digest != digests[first]:
            raise StepError(
                f"Ranks {first} and {rank} compute a batch together, but have read different ones. Let the data set and"
                " its loader draw random numbers from torch's, Python's or numpy's global generators, which are the"
                " same there, or from a generator with a seed of `trainer.strategy.distributed_sampler_kwargs['rank']`."
            )


def _digest(batch: Any) -> list[tuple[str, int]]:
    """Return the names and check sums of the tensors of a batch."""
    sums = []
    for name, tensor in entries_of(batch):
        # Sparse and nested tensors have no such bytes.
        if tensor.layout == torch.strided and not tensor.is_nested:
            content: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            sums.append((f"{name} {tuple(tensor.shape)} {tensor.dtype}", zlib.crc32(memoryview(content))))
    return sums
