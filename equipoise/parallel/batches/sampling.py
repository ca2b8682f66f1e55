"""Samplers for one of several processes: its samples of each step, or its batches in turn, without padding.

Torch's own DistributedSampler repeats samples until all processes have equally many, so it trains on some of them
twice. Here processes may have different numbers of samples, and one that has no batch in a step gets `NO_BATCH`.

Training      each step's samples are shared out over all processes, evenly or by shares
Evaluation    whole batches go to the processes in turn, so each is what it would be on one device
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from enum import Enum
from itertools import islice
from typing import Any, TypeVar

import torch
from torch.utils.data import Dataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from equipoise.parallel.snapshot.random_state import SameNumbers, drawn_alike

__all__ = [
    "NO_BATCH",
    "BatchesInTurn",
    "Collate",
    "DerivedSampler",
    "DrawnAlike",
    "FirstBatches",
    "SameOrder",
    "SharedBatches",
    "UnpaddedDistributedSampler",
    "sampler_with_epochs",
    "seed_of_order",
]

T = TypeVar("T")


class _Nothing(Enum):
    """Type of `NO_BATCH`. A member of an enumeration is the same object in every process."""

    NO_BATCH = "no batch"


NO_BATCH = _Nothing.NO_BATCH


def seed_of_order() -> int:
    """Return the seed of the order that all processes draw: that of `seed_everything`, which sets a variable."""
    return int(os.environ.get("PL_GLOBAL_SEED") or 0)


# Orders of samples


class UnpaddedDistributedSampler(DistributedSampler[Any]):
    """Deals each sample to one process, shuffled anew in each epoch. Numbers of samples differ by one at most.

    Args:
        dataset: The data.
        num_replicas: The number of processes.
        rank: The rank of this process.
        shuffle: Shuffle the samples. Default: True.
        seed: The same number in all processes. Default: 0.

    Example:
        >>> [list(UnpaddedDistributedSampler(range(5), 2, rank, shuffle=False)) for rank in range(2)]
        [[0, 2, 4], [1, 3]]
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sized,
        num_replicas: int,
        rank: int,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle=shuffle, seed=seed)  # type: ignore[arg-type]
        # Torch pads the total to a multiple of the number of processes. Here every sample counts once.
        self.total_size = len(dataset)  # type: ignore[arg-type]
        self.num_samples = len(range(rank, self.total_size, num_replicas))

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed + self.epoch)
            order: Sequence[int] = torch.randperm(self.total_size, generator=generator).tolist()
        else:
            order = range(self.total_size)
        return iter(order[self.rank : self.total_size : self.num_replicas])


class DrawnAlike(Sampler[Any]):
    """A sampler or batch sampler of the user, drawn with the same random numbers in every process.

    Args:
        sampler: The sampler.
        seed: The same number in all processes. Default: 0.
    """

    def __init__(self, sampler: Iterable[Any], seed: int = 0) -> None:
        self.sampler = sampler
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Use the order of this epoch from the next iteration on."""
        self.epoch = epoch
        set_epoch = getattr(self.sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        return drawn_alike(lambda: iter(self.sampler), self.seed + self.epoch)

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]


class SameOrder(DrawnAlike):
    """A sampler that is drawn with the same random numbers in every process, completely when an epoch begins.

    Args:
        sampler: The sampler.
        seed: The same number in all processes. Default: 0.
    """

    def __init__(self, sampler: Iterable[Any], seed: int = 0) -> None:
        super().__init__(sampler, seed)
        # The order that `draw` has drawn for the next iteration.
        self._order: list[Any] | None = None
        # Length of the order that was drawn last; None before the first.
        self._length: int | None = None

    def __iter__(self) -> Iterator[Any]:
        if self._order is None:
            self.draw()
        order = self._order
        self._order = None
        assert order is not None
        return iter(order)

    def draw(self) -> None:
        """Draw the order of the next iteration; from then on the length is that of the order."""
        with SameNumbers(self.seed + self.epoch):
            self._order = list(self.sampler)
        self._length = len(self._order)

    def __len__(self) -> int:
        if self._length is not None:
            return self._length
        return super().__len__()


# Batches of one process


class DerivedSampler(Sampler[Any]):
    """A sampler of ours that yields what another one yields, divided, joined or limited."""

    # The other one, whose number of items decides about that of this one.
    batch_sampler: Any


class SharedBatches(DerivedSampler):
    """Divides each step into parts, one for each process.

    Args:
        steps: A batch sampler whose batches are steps, with the samples of all processes together.
        sizes: Function of the number of samples in a step and the number of the step in the epoch. It returns the
            number of samples for each process.
        rank: The rank of this process.
    """

    def __init__(
        self,
        steps: Any,
        sizes: Callable[[int, int], Sequence[int]],
        rank: int,
    ) -> None:
        self.batch_sampler = steps
        self.sampler = steps.sampler
        self.sizes = sizes
        self.rank = rank

    def __iter__(self) -> Iterator[list[Any]]:
        # Immediately, not with the first batch: some samplers draw their order here.
        return self._parts(iter(self.batch_sampler))

    def _parts(self, steps: Iterator[list[Any]]) -> Iterator[list[Any]]:
        for step_number, step in enumerate(steps):
            sizes = self.sizes(len(step), step_number)
            begin = sum(sizes[: self.rank])
            end = begin + sizes[self.rank]
            yield step[begin:end]

    def __len__(self) -> int:
        return len(self.batch_sampler)


class FirstBatches(DerivedSampler):
    """The first batches of a batch sampler.

    Args:
        batches: The batch sampler, which has at least as many.
        count: Their number.
    """

    def __init__(self, batches: Any, count: int) -> None:
        self.batch_sampler = batches
        self.count = count
        self.sampler = batches.sampler

    def __iter__(self) -> Iterator[list[Any]]:
        return islice(iter(self.batch_sampler), self.count)

    def __len__(self) -> int:
        return self.count


def sampler_with_epochs(batches: Any) -> Any:
    """Return the sampler that receives the number of each epoch; None if there is none.

    The trainer calls `set_epoch` of a loader's `sampler`, also where the loader has a batch sampler.

    Args:
        batches: A batch sampler. It is returned itself if it has the method, else the sampler that it reads.
    """
    if callable(getattr(batches, "set_epoch", None)):
        return batches
    return getattr(batches, "sampler", None)


class BatchesInTurn(DerivedSampler):
    """Batches of a batch sampler for one of several processes, which take them in turn.

    Args:
        batches: A batch sampler that yields the same batches in all processes.
        rank: The rank of this process.
        count: The number of processes.
    """

    def __init__(self, batches: Any, rank: int, count: int) -> None:
        self.batch_sampler = batches
        self.rank = rank
        self.processes = count
        self.sampler = sampler_with_epochs(batches)

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.batch_sampler), self.rank, None, self.processes)

    def __len__(self) -> int:
        return len(range(self.rank, len(self.batch_sampler), self.processes))


# Batches without samples


class Collate:
    """A collate function around that of a loader; it returns `NO_BATCH` for a batch without samples.

    Where the inner function only stacks tensors, the rows of a batch are taken together, and only `divide` is called. A
    subclass that does more than collate overrides both.

    Args:
        collate: The collate function of the loader, for all other batches.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        """Return the batch, or `NO_BATCH`."""
        if isinstance(samples, list) and not samples:
            return NO_BATCH
        return self.collate(samples)

    def divide(self, batch: Any) -> Any:
        """Return what the function makes of samples that were stacked together already.

        Args:
            batch: Tensors of all samples, in containers.
        """
        return batch
