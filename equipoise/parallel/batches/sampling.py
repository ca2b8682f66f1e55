"""Samplers that deal each sample to exactly one process.

Torch's own DistributedSampler repeats samples until all processes have equally many, so it trains on some of them
twice. Here processes may have different numbers of samples, and one that has no batch in a step gets `NO_BATCH`.

Training      each step's samples are shared out over all processes, evenly or by shares
Evaluation    whole batches go to the processes in turn, so each is what it would be on one device
"""

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from enum import Enum
from typing import Any, TypeVar

import torch
from torch.utils.data import Dataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from equipoise.parallel.snapshot import random_state

__all__ = [
    "NO_BATCH",
    "BatchesInTurn",
    "Collate",
    "Filled",
    "SameOrder",
    "SharedBatches",
    "UnpaddedDistributedSampler",
]

T = TypeVar("T")


class _Nothing(Enum):
    """Stands for what is not there; the same object in every process."""

    NO_BATCH = "no batch"


NO_BATCH = _Nothing.NO_BATCH


class UnpaddedDistributedSampler(DistributedSampler[Any]):
    """Every process's own samples, shuffled anew in each epoch; they differ by one in number at most.

    Args:
        dataset: The data.
        num_replicas: The number of processes.
        rank: The number of this one.
        shuffle: Whether to shuffle. Default: True.
        seed: The same in all processes. Default: 0.

    Example:
        >>> [list(UnpaddedDistributedSampler(range(5), 2, rank, shuffle=False)) for rank in range(2)]
        [[0, 2, 4], [1, 3]]
    """

    def __init__(
        self, dataset: Dataset[Any] | Sized, num_replicas: int, rank: int, shuffle: bool = True, seed: int = 0
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle=shuffle, seed=seed)  # type: ignore[arg-type]
        self.num_samples = len(range(rank, len(dataset), num_replicas))  # type: ignore[arg-type]
        self.total_size = len(dataset)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed + self.epoch)
            order: Sequence[int] = torch.randperm(self.total_size, generator=generator).tolist()
        else:
            order = range(self.total_size)
        return iter(order[self.rank : self.total_size : self.num_replicas])


class SameOrder(Sampler[Any]):
    """A sampler of the user's, or a batch sampler, drawn with the same random numbers in every process.

    Args:
        sampler: The sampler. Its order is drawn whole, when an epoch begins.
        seed: The same in all processes.
    """

    def __init__(self, sampler: Iterable[Any], seed: int = 0) -> None:
        self.sampler, self.seed, self.epoch = sampler, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """The next order is that of this epoch."""
        self.epoch = epoch
        if callable(tell := getattr(self.sampler, "set_epoch", None)):
            tell(epoch)

    def __iter__(self) -> Iterator[Any]:
        with random_state.isolated():
            torch.manual_seed(self.seed + self.epoch)
            random.seed(self.seed + self.epoch)
            if (numpy := sys.modules.get("numpy")) is not None:
                numpy.random.seed((self.seed + self.epoch) % 2**32)
            return iter(list(self.sampler))

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]


class SharedBatches(Sampler[list[Any]]):
    """Cuts an order that all processes share into steps, and each step into parts, one for each process.

    Args:
        order: A sampler over all samples.
        batch_size: The number of samples in a step, of all processes together.
        sizes: The parts of a step of so many samples, by its number in the epoch.
        rank: Whose parts these are.
        drop_last: Whether a last step that is not full is left out.
    """

    def __init__(
        self, order: Any, batch_size: int, sizes: Callable[[int, int], Sequence[int]], rank: int, drop_last: bool
    ) -> None:
        self.sampler, self.batch_size, self.sizes, self.rank, self.drop_last = order, batch_size, sizes, rank, drop_last

    def __iter__(self) -> Iterator[list[Any]]:
        step: list[Any] = []
        number = 0
        for index in self.sampler:
            step.append(index)
            if len(step) == self.batch_size:
                yield self._part(step, number)
                step, number = [], number + 1
        if step and not self.drop_last:
            yield self._part(step, number)

    def _part(self, step: list[Any], number: int) -> list[Any]:
        sizes = self.sizes(len(step), number)
        begin = sum(sizes[: self.rank])
        return step[begin : begin + sizes[self.rank]]

    def __len__(self) -> int:
        full, rest = divmod(len(self.sampler), self.batch_size)
        return full + bool(rest and not self.drop_last)


class Filled(Sampler[list[Any]]):
    """A batch sampler that gives a certain number of batches, empty ones at the end.

    Args:
        batches: A batch sampler.
        count: How many.
    """

    def __init__(self, batches: Any, count: int) -> None:
        self.batch_sampler, self.count = batches, count
        self.sampler = getattr(batches, "sampler", None)

    def __iter__(self) -> Iterator[list[Any]]:
        given = 0
        for batch in self.batch_sampler:
            if given == self.count:
                return
            given += 1
            yield batch
        for _ in range(self.count - given):
            yield []

    def __len__(self) -> int:
        return self.count


class BatchesInTurn(Sampler[Any]):
    """Every so many batches of a batch sampler, for one of several processes.

    Args:
        batches: A batch sampler that gives the same in all processes.
        rank: The number of this process.
        count: The number of processes.
    """

    def __init__(self, batches: Any, rank: int, count: int) -> None:
        self.batch_sampler, self.rank, self.processes = batches, rank, count
        self.sampler = batches if callable(getattr(batches, "set_epoch", None)) else getattr(batches, "sampler", None)

    def __iter__(self) -> Iterator[Any]:
        return (batch for index, batch in enumerate(self.batch_sampler) if index % self.processes == self.rank)

    def __len__(self) -> int:
        return len(range(self.rank, len(self.batch_sampler), self.processes))


class Collate:
    """A collate function to which a batch without samples is `NO_BATCH`.

    Args:
        collate: The loader's own.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        """The batch, or `NO_BATCH`."""
        return NO_BATCH if isinstance(samples, list) and not samples else self.collate(samples)
