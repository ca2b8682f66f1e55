"""Batches of a process's parts: samples in one order for all, read and collated with random numbers of their own."""

import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, default_collate

from equipoise.errors import ConfigurationError
from equipoise.interop.torch.loaders import with_collated_batches, with_sampler
from equipoise.parallel.batches.sampling import NO_BATCH, Collate, SameOrder
from equipoise.parallel.batches.shares import even_sizes
from equipoise.parallel.batches.whole_steps import WholeSteps
from equipoise.parallel.snapshot.random_state import isolated
from equipoise.strategies.distributed.loaders import has_distributed_sampler, order_of_processes

__all__ = ["Parts", "part_loader", "seed_generators"]

# Numpy takes seeds of 32 bits.
_SEEDS_OF_NUMPY = 2**32


def seed_generators(*key: Any) -> None:
    """Seed the generators of torch, Python and numpy by a key, such as the epoch, the step and the number of a part."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    seed = int.from_bytes(digest[:8], "little") >> 1
    # `torch.manual_seed` would note the call for the start of CUDA, with its stack, in every step.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(seed % _SEEDS_OF_NUMPY)


class Parts(tuple[Any, ...]):
    """The parts of a batch that were collated one by one."""


class _Sample(NamedTuple):
    """A sample to be read, or its data.

    Attributes:
        value: The index of the sample, or what the data set returned for it.
        key: What random numbers of the sample depend on.
    """

    value: Any
    key: tuple[int, ...]


def part_loader(loader: Any, count: int, ranges: Sequence[tuple[int, int]], rank: int, seed: int) -> DataLoader[Any]:
    """Return a loader over the samples of one process, whose batches are parts of whole steps.

    Args:
        loader: The user's loader; its batches are whole steps.
        count: The number of parts of a step.
        ranges: The first part of each process and the part after its last one, by rank.
        rank: The rank of this process.
        seed: The seed of the run.

    Raises:
        ConfigurationError: If the loader does not show which samples belong to which part.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise ConfigurationError(
            "strategy='virtual' needs a DataLoader over a data set of known length, which"
            f" {type(getattr(loader, 'dataset', loader)).__name__} is not. Take such a loader, or strategy='ddp'."
        )
    if has_distributed_sampler(loader) or loader.batch_sampler is None:
        raise ConfigurationError(
            "strategy='virtual' divides batches among processes itself, so a loader needs a batch size, and no"
            " DistributedSampler."
        )
    if loader.batch_size is None:
        steps = WholeSteps(SameOrder(loader.batch_sampler, seed))
    else:
        order = order_of_processes(loader, seed)
        steps = WholeSteps(BatchSampler(order, loader.batch_size, loader.drop_last), size=loader.batch_size)
    batches = _PartBatches(steps, count, ranges[rank])
    if type(loader.dataset) is TensorDataset and loader.collate_fn is default_collate:
        # Nothing draws random numbers, and rows are taken together.
        batches.keyed = False
        plain = with_collated_batches(loader, loader.dataset, Collate(loader.collate_fn))
        return with_sampler(plain, batches, batches=True)
    first, end = ranges[rank]
    collate = _PartCollate(loader.collate_fn, end - first)
    return with_sampler(
        with_collated_batches(loader, _KeyedSamples(loader.dataset, seed), collate), batches, batches=True
    )


class _PartBatches(Sampler[list[Any]]):
    """The samples of one process in each step, with the keys of their random numbers.

    Args:
        steps: A batch sampler whose batches are whole steps, the same in all processes.
        count: The number of parts of a step.
        parts: The first part of this process and the part after its last one.

    Attributes:
        keyed: Whether samples come with keys. Default: True.
    """

    keyed: bool = True

    def __init__(self, steps: WholeSteps, count: int, parts: tuple[int, int]) -> None:
        self.batch_sampler = steps
        self.sampler: Any = steps.sampler
        self._count = count
        self._first, self._end = parts

    def __iter__(self) -> Iterator[list[Any]]:
        # Immediately, not with the first batch: some samplers draw their order here.
        steps = iter(self.batch_sampler)
        epoch = getattr(self.sampler, "epoch", 0)
        return self._parts(steps, epoch)

    def _parts(self, steps: Iterator[list[Any]], epoch: int) -> Iterator[list[Any]]:
        for number, step in enumerate(steps):
            sizes = even_sizes(len(step), self._count)
            begin = sum(sizes[: self._first])
            end = begin + sum(sizes[self._first : self._end])
            indices = step[begin:end]
            if self.keyed:
                yield [_Sample(index, (epoch, number, begin + place)) for place, index in enumerate(indices)]
            else:
                yield indices

    def __len__(self) -> int:
        return len(self.batch_sampler)


class _KeyedSamples(Dataset[Any]):
    """A data set whose samples draw random numbers that do not depend on the process that reads them.

    Args:
        dataset: The data set.
        seed: The seed of the run.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        # Users read attributes of the data set of their loader.
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitems__(self, samples: list[_Sample]) -> list[_Sample]:
        """Return the data of samples."""
        read = []
        with isolated():
            for index, key in samples:
                seed_generators(self.seed, "sample", *key)
                read.append(_Sample(self.dataset[index], key))
        return read


class _PartCollate:
    """Collates the samples of each part by themselves: they are padded alike in whichever process they are.

    Args:
        collate: The function of the user's loader.
        parts: The number of parts of this process.
    """

    def __init__(self, collate: Callable[[Any], Any], parts: int) -> None:
        self.collate = collate
        self.parts = parts

    def __call__(self, samples: list[_Sample]) -> Any:
        """Return the parts, or the batch as a whole where samples are only stacked."""
        if not samples:
            return NO_BATCH
        data = [sample.value for sample in samples]
        if self.collate is default_collate:
            return default_collate(data)
        parts = []
        first = 0
        with isolated():
            for size in even_sizes(len(samples), self.parts):
                if not size:
                    break
                seed_generators("collate", *samples[first].key)
                parts.append(self.collate(data[first : first + size]))
                first += size
        return Parts(parts)
