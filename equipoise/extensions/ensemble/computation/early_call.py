"""Calls that are known before the members make them: those whose arguments are parts of the batch.

Where the first member makes such a call, it is computed for all members. Each other step takes its output where it
makes the same call, without a thread that waits.
"""

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from equipoise.extensions.ensemble.computation.batched_call import BatchedCall, Call, TensorsOfMembers
from equipoise.interop.torch.modules import versions
from equipoise.tree import extract_tensors, is_slot, tensors_in

__all__ = ["EarlyCall", "parts_of_batches"]


class EarlyCall:
    """A call of the first member, computed for all members.

    Args:
        network: The network.
        tree: The structure of the arguments, with slots for tensors.
        tensors: The tensors of the call of each member.
        randomness: See `BatchedCall`.

    Attributes:
        network: The network.

    Raises:
        NotBatchable: If the calls cannot be computed together.
    """

    def __init__(self, network: BatchedCall, tree: Any, tensors: TensorsOfMembers, randomness: str) -> None:
        self.network = network
        self._structure = repr(tree)
        args, kwargs = tree
        has_one_argument = len(args) == 1 and not kwargs
        self._has_one_tensor = has_one_argument and is_slot(args[0])
        self._tensors = tensors
        self._buffers = network.buffers_now()
        self._outputs: list[Any] = network(tree, tensors, randomness)
        # The step of a member may change its arguments or its network before the call.
        members = range(len(tensors))
        self._versions = []
        for member in members:
            self._versions.append(self._versions_of(member))
        self._has_gradients = torch.is_grad_enabled()

    def take_first(self) -> Any:
        """Return the output of the first member."""
        return self._take(0)

    def take(self, member: int, call: Call) -> tuple[bool, Any]:
        """Return whether a member makes the call that was computed, and its output.

        Args:
            member: The index of the member, from 1.
            call: Its arguments.
        """
        if not self._is_same(member, call):
            return False, None
        return True, self._take(member)

    def put_back(self, member: int) -> None:
        """Undo what the call has done to the buffers of a member that has not made it."""
        self.network.restore_member(self._buffers, member)

    def _take(self, member: int) -> Any:
        output = self._outputs[member]
        # The step alone refers to it now.
        self._outputs[member] = None
        return output

    def _is_same(self, member: int, call: Call) -> bool:
        """Return True if a call would compute what was computed."""
        if torch.is_grad_enabled() != self._has_gradients:
            return False
        # The step asks for the gradient of its input, which the call that was computed does not have.
        if any(tensor.requires_grad for tensor in self._tensors[member]):
            return False
        if not self._has_arguments(member, call):
            return False
        if self._versions_of(member) != self._versions[member]:
            return False
        return not self.network.has_own_attributes(member)

    def _has_arguments(self, member: int, call: Call) -> bool:
        """Return True if a call has the tensors themselves, and equal other values."""
        args, kwargs = call
        expected = self._tensors[member]
        # The usual call has one tensor, which needs no search.
        if self._has_one_tensor and len(args) == 1 and not kwargs:
            return args[0] is expected[0]
        tree, tensors = extract_tensors(call)
        if len(tensors) != len(expected):
            return False
        if not all(map(is_, tensors, expected)):
            return False
        return repr(tree) == self._structure

    def _versions_of(self, member: int) -> list[int] | None:
        return versions([*self._tensors[member], *self.network.tensors_of(member)])


def parts_of_batches(tensors: Sequence[Tensor], batches: Sequence[Any]) -> list[list[Tensor]] | None:
    """Return, for each member, the parts of its batch that tensors are of the first member's.

    Args:
        tensors: The tensors of a call of the first member.
        batches: The batch of each member.

    Returns:
        None if a tensor is no part of the batch or requires a gradient, which the others do not yet, the batches differ
        in their number of tensors, or changes of the tensors leave no trace, as in inference mode.
    """
    if any(tensor.requires_grad for tensor in tensors):
        return None
    tensors_of_batches = list(map(_tensors_of, batches))
    places = {}
    for index, tensor in enumerate(tensors_of_batches[0]):
        places[id(tensor)] = index
    indices = []
    for tensor in tensors:
        place = places.get(id(tensor))
        if place is None:
            return None
        indices.append(place)
    lengths = set(map(len, tensors_of_batches))
    if len(lengths) > 1:
        return None
    # In inference mode there are no versions.
    if versions(tensors) is None:
        return None
    tensors_of_members = []
    for tensors_of_batch in tensors_of_batches:
        tensors_of_members.append([tensors_of_batch[index] for index in indices])
    return tensors_of_members


def _tensors_of(batch: Any) -> list[Tensor]:
    # The usual batch is a list of tensors, which needs no search.
    if type(batch) is list:
        types = set(map(type, batch))
        if types == {Tensor}:
            return batch
    return list(tensors_in(batch))
