"""Deal whole batches of a loader to the processes in turn, as evaluations read them: none twice, none padded.

Training deals batches of what is no `DataLoader` in the same way.
"""

from collections.abc import Iterator, Sized
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from equipoise.interop.torch.loaders import with_sampler
from equipoise.parallel.batches.sampling import BatchesInTurn, SameOrder
from equipoise.parallel.batches.shard import count_of_rank

__all__ = ["Turns", "deal_batches", "is_dealt", "with_batch_for_each"]


def deal_batches(loader: Any, rank: int, count: int) -> Any:
    """Return one process's part of a loader: whole batches, in turn, none of them twice.

    Args:
        loader: The loader, the same in all processes.
        rank: The rank of the process.
        count: The number of processes.
    """
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        return Turns(loader, rank, count)
    if isinstance(loader.dataset, IterableDataset):
        return Turns(loader, rank, count)
    # A batch sampler skips the batches of other processes without reading them.
    batches: Any = loader.batch_sampler
    in_order = loader.batch_size is not None and isinstance(loader.sampler, SequentialSampler)
    if not in_order:
        batches = SameOrder(batches)
    return with_sampler(loader, BatchesInTurn(batches, rank, count), batches=True)


def with_batch_for_each(loader: Any, count: int) -> Any:
    """Return a loader with smaller batches, where it has fewer batches than processes and enough samples for each.

    The outputs that a process collects over an evaluation are then not empty.

    Args:
        loader: The loader, the same in all processes.
        count: The number of processes.
    """
    if not isinstance(loader, DataLoader) or loader.batch_size is None or loader.drop_last:
        return loader
    sampler = loader.sampler
    if isinstance(loader.dataset, IterableDataset) or not isinstance(sampler, Sized):
        return loader
    samples = len(sampler)
    if samples < count or len(loader) >= count:
        return loader
    size = samples // count
    smaller = with_sampler(loader, sampler)
    # A DataLoader refuses to exchange these, so they are set below that guard.
    vars(smaller).update(batch_size=size, batch_sampler=BatchSampler(sampler, size, drop_last=False))
    return smaller


def is_dealt(loader: Any) -> bool:
    """Return whether one process's part of a loader consists of its batches in turn."""
    return isinstance(loader, Turns) or isinstance(getattr(loader, "batch_sampler", None), BatchesInTurn)


class Turns:
    """One process's batches of an iterable that are dealt to the processes in turn.

    Args:
        loader: The iterable, the same in all processes.
        rank: The rank of this process.
        count: The number of processes.
    """

    def __init__(self, loader: Any, rank: int, count: int) -> None:
        self.loader = loader
        self.rank = rank
        self.processes = count
        self.sampler = getattr(loader, "sampler", None)

    def __len__(self) -> int:
        return count_of_rank(len(self.loader), self.rank, self.processes)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        while True:
            turn = list(islice(batches, self.processes))
            if self.rank < len(turn):
                yield turn[self.rank]
            if len(turn) < self.processes:
                return
