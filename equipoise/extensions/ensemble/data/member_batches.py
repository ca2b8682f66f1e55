"""The batches of all members from one loader: each member has an order of its own.

    MemberOrder        samples the indices of a batch of each member, one after the other
    MemberCollate      cuts what was read into the members' batches
    MembersBatch       the batches, one for each member
    MemberParts        the batches on their device

The workers, the dataset and the collate function are those of the loader.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from equipoise.errors import StepError
from equipoise.extensions.ensemble.data.random_streams import RandomStreams
from equipoise.interop.torch.loaders import with_sampler
from equipoise.parallel.batches.sampling import Collate
from equipoise.parallel.batches.splitting import split
from equipoise.tree import items_of, map_leaves, rebuild

__all__ = ["MemberCollate", "MemberParts", "MembersBatch", "batch_of", "with_member_order", "with_seed_drawing"]

# Samplers of torch that draw all of their random numbers when they are asked for the first index.
_DRAW_AT_ONCE = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class MembersBatch(list[Any]):
    """The batches of a step, one for each member."""


class MemberParts(tuple[Any, ...]):
    """The batches of all members on their device. As a sequence it has one item, which hooks see: the first member's.

    Attributes:
        members: The batch of each member.
    """

    members: list[Any]

    @classmethod
    def of(cls, members: list[Any]) -> "MemberParts":
        """Return the batches of all members as the parts of one batch."""
        parts = cls(members[:1])
        parts.members = members
        return parts


def batch_of(batch: Any, member: int) -> Any:
    """Return the batch of a member, from the batches of one or several loaders.

    Args:
        batch: A batch of the loader: a `MembersBatch`, containers of them, or a batch that all members share.
        member: The index of the member.
    """
    if isinstance(batch, MembersBatch):
        return batch[member]
    if isinstance(batch, torch.Tensor):
        return batch
    items = items_of(batch)
    if items is None:
        return batch
    parts = [batch_of(item, member) for item in items]
    if all(part is item for part, item in zip(parts, items, strict=True)):
        # The same object, so that all members are seen to share it.
        return batch
    return rebuild(batch, parts)


class MemberCollate(Collate):
    """A collate function that returns the batch of each member.

    Args:
        collate: The collate function of the loader.
        members: The number of members.
    """

    def __init__(self, collate: Callable[[Any], Any], members: int) -> None:
        super().__init__(collate)
        self.members = members

    def __call__(self, samples: Any) -> MembersBatch:
        """Return the batches of samples that were read in the order of members."""
        size = len(samples) // self.members
        batches = [self.collate(samples[begin : begin + size]) for begin in range(0, size * self.members, size)]
        return MembersBatch(batches)

    def divide(self, batch: Any) -> MembersBatch:
        """Return the batches of samples that were collated together, as views.

        Args:
            batch: Tensors of all samples, in containers; or the batches themselves.
        """
        if isinstance(batch, MembersBatch):
            return batch
        size = _length_of(batch) // self.members
        # The usual batch is a list of tensors. Cutting it directly takes a fraction of the time.
        if type(batch) is list:
            kinds = set(map(type, batch))
            if kinds == {torch.Tensor}:
                return self._divided(batch, size)
        return MembersBatch(map_leaves(_detached, part) for part in split(batch, [size] * self.members))

    @staticmethod
    def _divided(tensors: list[torch.Tensor], size: int) -> MembersBatch:
        columns = []
        for tensor in tensors:
            # Unlike views, these have no count of changes in common.
            columns.append(torch.unsafe_split(tensor, size))
        return MembersBatch(map(list, zip(*columns, strict=True)))


def _detached(value: Any) -> Any:
    """Return the same memory as a tensor of its own; a value that is no tensor as it is.

    Views have one count of changes in common: a member that changes its batch would disturb the others' graphs.
    """
    if isinstance(value, torch.Tensor):
        return value.data
    return value


def _length_of(batch: Any) -> int:
    while not isinstance(batch, torch.Tensor):
        items = items_of(batch)
        assert items is not None
        batch = next(iter(items))
    return len(batch)


class MemberOrder(Sampler[list[Any]]):
    """A batch sampler that yields the indices of a batch of each member, one after the other.

    Each member draws its order as the loader of its own run would: for that time `streams.run` puts the member's state
    into the global generator, and into the private one from which the sampler draws, if there is one.

    Args:
        batches: The batch sampler of the loader.
        loader_generator: The private generator of the loader, if it has one.
        streams: The random numbers of the members.
        members: The number of members.

    Attributes:
        sampler: The sampler of the user, which learns the number of the epoch.
        generator: The streams; the trainer saves their state with that of other generators of loaders.
    """

    def __init__(
        self, batches: Any, loader_generator: torch.Generator | None, streams: RandomStreams, members: int
    ) -> None:
        self.batch_sampler = batches
        self.sampler = getattr(batches, "sampler", None)
        self.generator = streams
        self._loader_generator = loader_generator
        self._members = members
        # A sampler without a generator draws from the loader's, as in torch.
        self._private = getattr(self.sampler, "generator", None) or loader_generator
        # A sampler with a private generator draws from it once more at the end.
        self._draws_at_once = self._private is None and _draws_at_once(batches)

    def __iter__(self) -> Iterator[list[Any]]:
        streams = self.generator
        streams.begin_training()
        # 1. The first batch of each member, with which it draws its order.
        iterators: list[Iterator[Any]] = []
        firsts = []
        for member in range(self._members):
            iterator, first = streams.run(member, partial(self._begin, member), self._private)
            iterators.append(iterator)
            firsts.append(first)

        # 2. All batches.
        batches = firsts
        while None not in batches:
            yield self._joined(batches)
            if self._draws_at_once:
                batches = [next(iterator, None) for iterator in iterators]
            else:
                batches = [self._next(member, iterator) for member, iterator in enumerate(iterators)]

    def _begin(self, member: int) -> tuple[Iterator[Any], Any]:
        """Return a member's batches after the first, and the first; None if there is none."""
        if member:
            # The loader has drawn the seed of its workers before, for the first member alone.
            torch.empty((), dtype=torch.int64).random_(generator=self._loader_generator)
        iterator = iter(self.batch_sampler)
        return iterator, next(iterator, None)

    def _next(self, member: int, iterator: Iterator[Any]) -> Any:
        """Return the next batch of a member, for which it may draw random numbers; None if there is none."""
        return self.generator.run(member, lambda: next(iterator, None), self._private)

    def _joined(self, batches: Sequence[Any]) -> list[Any]:
        indices: list[Any] = []
        for batch in batches:
            indices.extend(batch)
        if len(indices) != self._members * len(batches[0]):
            sizes = [len(batch) for batch in batches]
            raise StepError(
                f"The batches of the members differ in size: {sizes}. Members are trained side by side with equal"
                " batches: take a batch sampler that yields them, or EnsembleStrategy(own_order=False)."
            )
        return indices

    def __len__(self) -> int:
        return len(self.batch_sampler)


def _draws_at_once(batches: Any) -> bool:
    """Return True if a batch sampler draws all random numbers with its first batch."""
    if type(batches) is not BatchSampler:
        return False
    sampler = batches.sampler
    # With replacement it draws a few dozen indices at a time.
    if isinstance(sampler, RandomSampler) and sampler.replacement:
        return False
    return type(sampler) in _DRAW_AT_ONCE


def with_member_order(loader: Any, streams: RandomStreams, members: int) -> Any:
    """Return a loader that yields a batch for each member, in an order of its own.

    A loader whose order nothing changes stays as it is: all members then share its batches. Such are loaders that do
    not shuffle, streams, other iterables than a DataLoader, and those that save their own position.

    Args:
        loader: A training loader.
        streams: The random numbers of the members.
        members: The number of members.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader
    saves_position = callable(getattr(loader, "state_dict", None))
    if loader.batch_sampler is None or saves_position:
        return loader
    # The sampler of a loader with a batch sampler of the user's own is torch's default.
    if loader.batch_size is not None and isinstance(loader.sampler, SequentialSampler):
        return loader
    order = MemberOrder(loader.batch_sampler, loader.generator, streams, members)
    copy = with_sampler(loader, order, batches=True)
    # A DataLoader refuses to exchange some of its attributes, so this one is set below that guard too.
    vars(copy)["collate_fn"] = MemberCollate(loader.collate_fn, members)
    return copy


class _SeedDrawing:
    """A batch sampler that lets each stream draw the numbers that a pass of its loader draws.

    Args:
        batches: The batch sampler of the loader.
        streams: The random numbers of the members.
    """

    def __init__(self, batches: Any, streams: RandomStreams) -> None:
        self.batch_sampler = batches
        self.sampler = getattr(batches, "sampler", None)
        self._streams = streams

    def __iter__(self) -> Iterator[Any]:
        self._streams.draw(self._draw)
        return iter(self.batch_sampler)

    def _draw(self) -> None:
        # 1. The seed of workers.
        torch.empty((), dtype=torch.int64).random_()
        # 2. The order, unless it comes from a private generator. Batches are those of the first member.
        if getattr(self.sampler, "generator", None) is None:
            batches = iter(self.batch_sampler)
            next(batches, None)
            if not _draws_at_once(self.batch_sampler):
                deque(batches, maxlen=0)

    def __len__(self) -> int:
        return len(self.batch_sampler)


def with_seed_drawing(loader: Any, streams: RandomStreams) -> Any:
    """Return a loader of an evaluation, each pass of which moves the streams of the members as their own runs would.

    Args:
        loader: The loader.
        streams: The random numbers of the members.
    """
    is_plain = type(loader) is DataLoader and not isinstance(loader.dataset, IterableDataset)
    if not is_plain or loader.batch_sampler is None or loader.generator is not None:
        return loader
    return with_sampler(loader, _SeedDrawing(loader.batch_sampler, streams), batches=True)
