"""The order of each member: what a loader asks its sampler for, and what it draws meanwhile, once for each member."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from equipoise.errors import StepError
from equipoise.extensions.ensemble.data.member_batches import MemberCollate
from equipoise.extensions.ensemble.data.random_streams import LoaderStreams, RandomStreams
from equipoise.interop.torch.loaders import with_sampler
from equipoise.parallel.batches.sampling import DerivedSampler

__all__ = ["with_member_order"]

# Samplers of torch that draw all of their random numbers when they are asked for the first index.
_DRAW_AT_ONCE = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class MemberOrder(DerivedSampler):
    """A sampler that draws for each member what the loader of its own run draws: the seed of workers, and an order.

    For that time `streams.run` puts the member's state into the global generator, and into private ones.

    Args:
        loader: The user's loader.
        streams: The random numbers of the members.
        members: The number of members.
        is_shared: Whether all members see the batches of the first one. Else a batch has the indices of each member,
            one after the other.
        is_training: Whether the loader is read in a training.

    Attributes:
        sampler: The sampler of the user, which learns the number of the epoch.
        generator: The streams; the trainer saves their state with that of other generators of loaders.
    """

    def __init__(
        self, loader: DataLoader[Any], streams: RandomStreams, members: int, *, is_shared: bool, is_training: bool
    ) -> None:
        self.batch_sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self.sampler = getattr(self.batch_sampler, "sampler", self.batch_sampler)
        self._loader_generator = loader.generator
        owners = (loader, self.batch_sampler, self.sampler)
        generators = [getattr(owner, "generator", None) for owner in owners]
        self._private = list(dict.fromkeys(owned for owned in generators if isinstance(owned, torch.Generator)))
        self.generator = LoaderStreams(streams, self._private)
        self._streams = streams
        self._further_members = range(1, members)
        self._is_shared = is_shared
        self._is_training = is_training
        self._has_workers = loader.num_workers > 0
        self._keeps_workers = loader.persistent_workers
        self._has_started = False
        # The sampler of a stream draws nothing.
        self._draws_at_once = isinstance(loader.dataset, IterableDataset) or _draws_at_once(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        if self._is_training:
            self._streams.begin_training()
        # Immediately, as some samplers draw here.
        iterator = iter(self.batch_sampler)
        if self._has_workers:
            return self._batches(iterator, None)
        return self._batches(iterator, self._open_further())

    def _open_further(self) -> list[Iterator[Any]]:
        """Return the batches of all members but the first, and draw the seed of workers, as opening a loader does."""
        return [self._streams.run(member, self._open, self._private) for member in self._further_members]

    def _open(self) -> Iterator[Any]:
        iterator: Iterator[Any] = iter(self.batch_sampler)
        # Workers that stay have their seed.
        if self._has_started and self._keeps_workers:
            return iterator
        torch.empty((), dtype=torch.int64).random_(generator=self._loader_generator)
        # A loader with workers asks once more when it has started them.
        if self._has_workers:
            iterator = iter(self.batch_sampler)
        return iterator

    def _batches(self, first: Iterator[Any], further: list[Iterator[Any]] | None) -> Iterator[Any]:
        # Workers are given batches before the next loader is opened. Of loaders without workers all are opened before
        # the first batch is read.
        if further is None:
            further = self._open_further()
        self._has_started = True
        draws = True
        for batch in first:
            if self._is_shared:
                if draws:
                    self._next_of(further)
                yield batch
            else:
                batches = self._next_of(further, draws=draws)
                if None in batches:
                    return
                yield self._joined([batch, *batches])
            draws = not self._draws_at_once
        # The end of an order may draw, too.
        if draws:
            self._next_of(further)

    def _next_of(self, further: list[Iterator[Any]], *, draws: bool = True) -> list[Any]:
        """Return the next batch of all members but the first, for which they may draw; None if there is none."""
        if not draws:
            return [next(iterator, None) for iterator in further]
        return [
            self._streams.run(member, partial(next, iterator, None), self._private)
            for member, iterator in zip(self._further_members, further, strict=True)
        ]

    def _joined(self, batches: Sequence[Any]) -> list[Any]:
        indices: list[Any] = []
        for batch in batches:
            indices.extend(batch)
        if len(indices) != len(batches) * len(batches[0]):
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
        return type(batches) is SequentialSampler
    sampler = batches.sampler
    # One with a private generator draws from it during a pass, and once more at the end.
    return type(sampler) in _DRAW_AT_ONCE and getattr(sampler, "generator", None) is None


def with_member_order(loader: Any, streams: RandomStreams, members: int, *, own_order: bool, is_training: bool) -> Any:
    """Return a loader, each pass of which moves the random numbers of each member as its own run would.

    In a training it yields a batch for each member, in an order of its own. Where nothing changes the order, and in
    evaluations, all members share the batches. Iterables other than a DataLoader, and loaders that save their own
    position, stay as they are.

    Args:
        loader: A loader.
        streams: The random numbers of the members.
        members: The number of members.
        own_order: Whether members have an order of their own in a training.
        is_training: Whether it is a loader of a training.
    """
    if not isinstance(loader, DataLoader) or callable(getattr(loader, "state_dict", None)):
        return loader
    # The sampler of a loader with a batch sampler of the user's own is torch's default.
    reads_in_order = loader.batch_size is not None and isinstance(loader.sampler, SequentialSampler)
    has_no_order = loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset)
    is_shared = not (is_training and own_order) or reads_in_order or has_no_order
    order = MemberOrder(loader, streams, members, is_shared=is_shared, is_training=is_training)
    copy = with_sampler(loader, order, batches=loader.batch_sampler is not None)
    if not is_shared:
        # A DataLoader refuses to exchange some of its attributes, so this one is set below that guard too.
        vars(copy)["collate_fn"] = MemberCollate(loader.collate_fn, members)
    return copy
