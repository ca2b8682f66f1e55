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
from equipoise.parallel.batches.dealing import deal_batches
from equipoise.parallel.batches.sampling import NO_BATCH, SameOrder
from equipoise.parallel.batches.shares import even_sizes
from equipoise.parallel.batches.whole_steps import WholeSteps
from equipoise.parallel.snapshot.random_state import isolated
from equipoise.strategies.distributed.loaders import has_distributed_sampler, order_of_processes

__all__ = ["Part", "Parts", "evaluation_loader", "part_loader", "seed_generators", "state_key"]

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


def state_key() -> str:
    """Return a key that follows from the present state of torch's generator, the same in all processes."""
    content = torch.default_generator.get_state().numpy().tobytes()
    return hashlib.sha256(content).hexdigest()


class Part(NamedTuple):
    """A part of a step.

    Attributes:
        batch: Its batch.
        size: The number of its samples.
        key: The values that its random numbers depend on.
        place: Index of the device that computes it, among those of its process.
    """

    batch: Any
    size: int
    key: tuple[Any, ...] = ()
    place: int = 0


class Parts(list[Part]):
    """The parts of a step that one process computes, as its loader returns them."""


class _Keyed(list[Any]):
    """Indices of samples that are read and collated together.

    Args:
        indices: The indices.
        key: The values that their random numbers depend on.
    """

    def __init__(self, indices: Sequence[Any], *key: Any) -> None:
        super().__init__(indices)
        self.key = key


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
        batches = BatchSampler(order_of_processes(loader, seed), loader.batch_size, loader.drop_last)
        steps = WholeSteps(batches, size=loader.batch_size)
    parts = _PartBatches(steps, count, ranges[rank], seed)
    return with_sampler(_read_by_key(loader), parts, batches=True)


def evaluation_loader(loader: DataLoader[Any], rank: int, processes: int) -> DataLoader[Any]:
    """Return a loader over the batches that one process evaluates, each with random numbers of its own.

    Args:
        loader: The user's loader, over a data set of known length and with a batch sampler.
        rank: The rank of this process.
        processes: The number of processes.
    """
    dealt: DataLoader[Any] = deal_batches(loader, rank, processes)
    if _draws_nothing(loader):
        return dealt
    batches = _DealtBatches(dealt.batch_sampler, rank, processes)
    return with_sampler(_read_by_key(dealt), batches, batches=True)


def _draws_nothing(loader: DataLoader[Any]) -> bool:
    """Return whether samples of a loader are rows of tensors in memory, which are only stacked."""
    return type(loader.dataset) is TensorDataset and loader.collate_fn is default_collate


def _read_by_key(loader: DataLoader[Any]) -> DataLoader[Any]:
    return with_collated_batches(loader, _KeyedBatches(loader), _as_it_is)


class _PartBatches(Sampler[list[Any]]):
    """The parts of one process in each step, with the keys of their random numbers.

    Args:
        steps: A batch sampler whose batches are whole steps, the same in all processes.
        count: The number of parts of a step.
        parts: The first part of this process and the part after its last one.
        seed: The seed of the run.
    """

    def __init__(self, steps: WholeSteps, count: int, parts: tuple[int, int], seed: int) -> None:
        self.batch_sampler = steps
        self.sampler: Any = steps.sampler
        self._count = count
        self._range = range(*parts)
        self._seed = seed

    def __iter__(self) -> Iterator[list[Any]]:
        # Immediately, not with the first batch: some samplers draw their order here.
        return self._batches(iter(self.batch_sampler), getattr(self.sampler, "epoch", 0))

    def _batches(self, steps: Iterator[list[Any]], epoch: int) -> Iterator[list[Any]]:
        for number, step in enumerate(steps):
            parts = []
            end = 0
            for part, size in enumerate(even_sizes(len(step), self._count)):
                begin = end
                end += size
                # A part may be empty where a step has fewer samples than parts.
                if size and part in self._range:
                    parts.append(_Keyed(step[begin:end], self._seed, "data", epoch, number, part))
            yield parts

    def __len__(self) -> int:
        return len(self.batch_sampler)


class _DealtBatches(Sampler[list[Any]]):
    """Batches that were dealt to a process in turn, with the keys of their random numbers.

    Args:
        batches: The batch sampler of this process.
        rank: The rank of this process.
        processes: The number of processes.
    """

    def __init__(self, batches: Any, rank: int, processes: int) -> None:
        self.batch_sampler = batches
        self.sampler: Any = batches.sampler
        self._rank = rank
        self._processes = processes

    def __iter__(self) -> Iterator[list[Any]]:
        # Immediately, not with the first batch: all processes have the same state here.
        return self._batches(iter(self.batch_sampler), state_key())

    def _batches(self, batches: Iterator[list[Any]], key: str) -> Iterator[list[Any]]:
        for number, indices in enumerate(batches):
            yield _Keyed(indices, "evaluated", key, number * self._processes + self._rank)

    def __len__(self) -> int:
        return len(self.batch_sampler)


class _KeyedBatches(Dataset[Any]):
    """Collated batches of a data set, whose random numbers do not depend on the process that reads them.

    Samples of a part are collated by themselves, so they are padded alike in whichever process they are.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.dataset: Any = loader.dataset
        self.collate = loader.collate_fn
        self._are_rows = _draws_nothing(loader)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        # Users read attributes of the data set of their loader.
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitems__(self, indices: list[Any]) -> Any:
        """Return the batch of indices with a key, or the parts of a list of such."""
        if not indices:
            return NO_BATCH
        if self._are_rows:
            return self._parts(indices, self._rows)
        with isolated():
            if isinstance(indices, _Keyed):
                return self._read(indices)
            return self._parts(indices, self._read)

    def _parts(self, indices_of_parts: list[Any], read: Callable[[_Keyed], Any]) -> Parts:
        parts = Parts()
        for indices in indices_of_parts:
            parts.append(Part(read(indices), len(indices), indices.key))
        return parts

    def _rows(self, indices: _Keyed) -> list[Any]:
        # Memory of its own for each part: kernels round by how it is aligned, which differs between views.
        rows = torch.tensor(indices)
        return [tensor[rows] for tensor in self.dataset.tensors]

    def _read(self, indices: _Keyed) -> Any:
        seed_generators(*indices.key)
        # As torch's loaders read: all together, if the data set has a method for it.
        read_together = getattr(self.dataset, "__getitems__", None)
        if read_together is not None:
            samples = read_together(list(indices))
        else:
            samples = [self.dataset[index] for index in indices]
        return self.collate(samples)


def _as_it_is(batch: Any) -> Any:
    return batch
