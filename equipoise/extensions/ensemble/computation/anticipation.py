"""Calls that are known before the steps run: those whose arguments are parts of the batch.

Then the network is computed for all members first, and each step takes its output where it calls the network, without a
thread that waits. Calls are observed and compared before any is anticipated, and each one is checked where it is made.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from equipoise.extensions.ensemble.computation.batched_call import BatchedCall, Call
from equipoise.interop.torch.modules import versions
from equipoise.tree import extract_tensors, insert_tensors, items_of, tensors_in

__all__ = ["AnticipatedCalls", "Anticipation", "is_same_call", "pattern_of"]

# Agreements after which anticipated calls are used, and failures after which nothing is anticipated any more.
_AGREEMENTS = 2
_MOST_FAILURES = 3


class Pattern(NamedTuple):
    """The way in which a call follows from a batch.

    Attributes:
        name: The name of the network.
        tree: The structure of the arguments.
        sources: For each tensor of the arguments, its index among the tensors of the batch.
    """

    name: str
    tree: Any
    sources: tuple[int, ...]

    def tensors(self, batches: Sequence[Any]) -> list[list[Tensor]] | None:
        """Return the tensors of the call of each member; None if the batches lack them.

        Args:
            batches: The batch of each member.
        """
        columns = []
        last = max(self.sources, default=-1)
        for batch in batches:
            tensors = _tensors_of(batch)
            if last >= len(tensors):
                return None
            column = [tensors[index] for index in self.sources]
            columns.append(column)
        return columns

    def is_like(self, other: "Pattern") -> bool:
        """Return True if another pattern is the same."""
        if self.name != other.name or self.sources != other.sources:
            return False
        return repr(self.tree) == repr(other.tree)


def _tensors_of(batch: Any) -> Sequence[Tensor]:
    """Return the tensors of a batch, in order."""
    # The usual batch is a list of tensors, which needs no search.
    if type(batch) in (list, tuple):
        kinds = set(map(type, batch))
        if kinds == {Tensor}:
            tensors: Sequence[Tensor] = batch
            return tensors
    return list(tensors_in(batch))


def pattern_of(name: str, calls: Sequence[Call], batches: Sequence[Any]) -> Pattern | None:
    """Return the way in which the calls of all members follow from their batches; None if they do not.

    Args:
        name: The name of the network.
        calls: The call of each member.
        batches: The batch of each member.
    """
    patterns = []
    for call, batch in zip(calls, batches, strict=True):
        tree, tensors = extract_tensors(call)
        # 1. The index of each tensor of the call among those of the batch.
        indices = {}
        for index, tensor in enumerate(tensors_in(batch)):
            indices[id(tensor)] = index
        sources = []
        for tensor in tensors:
            source = indices.get(id(tensor))
            if source is None:
                return None
            sources.append(source)
        patterns.append(Pattern(name, tree, tuple(sources)))

    # 2. All members must have the same.
    first = patterns[0]
    if all(first.is_like(pattern) for pattern in patterns[1:]):
        return first
    return None


class Anticipation:
    """Says whether the calls of the next step are known.

    Attributes:
        pattern: The way in which they follow from the batch; None if they do not.
        is_trusted: True after anticipated calls were the same as those that came.
    """

    def __init__(self) -> None:
        self.pattern: Pattern | None = None
        self._agreements = 0
        self._failures = 0

    @property
    def is_trusted(self) -> bool:
        """True after enough agreements."""
        return self._agreements >= _AGREEMENTS

    def observe(self, calls: Sequence[tuple[str, Sequence[Call]]], batches: Sequence[Any]) -> None:
        """Note the calls that all members have made together in a step: only a single one can be known before.

        Args:
            calls: The names of the networks, with the call of each member.
            batches: The batch of each member.
        """
        if self._failures >= _MOST_FAILURES or len(calls) != 1:
            self.pattern = None
            return
        name, calls_of_members = calls[0]
        self.pattern = pattern_of(name, calls_of_members, batches)

    def agree(self) -> None:
        """Note a call that gave what was anticipated."""
        self._agreements += 1

    def fail(self) -> None:
        """Note a call that was not what was anticipated, or did not come."""
        self.pattern = None
        self._agreements = 0
        self._failures += 1


class AnticipatedCalls:
    """The outputs of a network for the calls that the members will make.

    Args:
        network: The network.
        pattern: The way in which the calls follow from the batches.
        tensors: The tensors of the call of each member.
        randomness: See `BatchedCall`.

    Attributes:
        network: The network.

    Raises:
        NotBatchable: If they cannot be computed together.
    """

    def __init__(
        self, network: BatchedCall, pattern: Pattern, tensors: Sequence[Sequence[Tensor]], randomness: str
    ) -> None:
        self.network = network
        self._tree = pattern.tree
        self._tensors = tensors
        self._noted = network.note()
        self._outputs: list[Any] = network.again(pattern.tree, tensors, randomness, self._noted)
        # The step may change its arguments, the network or torch's modes before the call.
        self._state = network.state_of_call()
        self._versions = [versions(column) for column in tensors]
        self._taken = [False] * len(tensors)
        self._is_taken_by_first = False

    def take(self, member: int, call: Call) -> tuple[bool, Any]:
        """Return whether a call is the one that was anticipated, and its output.

        Args:
            member: The index of the member.
            call: Its call, where it is made.
        """
        if self._taken[member]:
            return False, None
        tensors = self._tensors[member]
        if not self._is_anticipated(call, tensors):
            return False, None
        present = versions(tensors)
        if present is None or present != self._versions[member]:
            return False, None
        # The network that computes is the first member's. Its step is the first that runs.
        if member == 0:
            is_valid = self.network.is_in_state(self._state)
        else:
            has_own_attributes = self.network.has_own_attributes(member)
            is_valid = self._is_taken_by_first and not has_own_attributes
        if not is_valid:
            return False, None
        self._is_taken_by_first = True
        self._taken[member] = True
        output = self._outputs[member]
        self._outputs[member] = None
        return True, output

    def _is_anticipated(self, call: Call, tensors: Sequence[Tensor]) -> bool:
        """Return True if a call has these tensors in the places that were anticipated."""
        args, kwargs = call
        # The usual call has one argument.
        if len(args) == 1 and not kwargs and len(tensors) == 1:
            return args[0] is tensors[0]
        return is_same_call(call, self._tree, tensors)

    def put_back(self, member: int) -> bool:
        """Undo what the anticipated call has done to the buffers of a member that did not make it.

        Args:
            member: The index of the member.

        Returns:
            Whether there was anything to undo.
        """
        if self._taken[member]:
            return False
        self._taken[member] = True
        self.network.restore_member(self._noted, member)
        return True

    def are_equal_to(self, outputs: Sequence[Any]) -> bool:
        """Return True if the outputs are the same as others."""
        _, anticipated = extract_tensors(self._outputs)
        _, computed = extract_tensors(list(outputs))
        if len(anticipated) != len(computed):
            return False
        return all(map(_equal, anticipated, computed))

    def put_back_all(self) -> None:
        """Undo what the call has done to the buffers of all members."""
        self.network.restore_buffers(self._noted)


def _equal(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.detach(), right.detach())


def is_same_call(value: Any, tree: Any, tensors: Sequence[Tensor]) -> bool:
    """Return True if a call has a structure, the tensors themselves, and equal other values.

    Args:
        value: The call, or a part of it.
        tree: The structure, with slots for tensors.
        tensors: The tensors of the slots.
    """
    if isinstance(value, Tensor):
        return insert_tensors(tree, tensors) is value
    if type(value) is not type(tree):
        return False
    items = items_of(value)
    if items is None:
        return bool(value == tree)
    if isinstance(value, dict) and value.keys() != tree.keys():
        return False
    values = list(items)
    places = list(items_of(tree) or ())
    if len(values) != len(places):
        return False
    return all(is_same_call(item, place, tensors) for item, place in zip(values, places, strict=True))
