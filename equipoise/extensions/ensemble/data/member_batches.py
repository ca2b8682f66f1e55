"""The batches of all members from one loader.

    MemberCollate      cuts what was read into the members' batches
    MembersBatch       the batches, one for each member
    MemberParts        the batches on their device

The workers, the dataset and the collate function are those of the loader.
"""

from collections.abc import Callable
from typing import Any

import torch

from equipoise.parallel.batches.sampling import Collate
from equipoise.parallel.batches.splitting import split
from equipoise.tree import items_of, map_leaves, rebuild

__all__ = ["MemberCollate", "MemberParts", "MembersBatch", "batch_of"]


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
