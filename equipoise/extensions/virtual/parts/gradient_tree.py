"""Sums of gradients in the order of a fixed tree, whichever process computes which parts.

The leaves of the tree are the parts of a step, in their order. A node is the sum of its two children, left plus right,
or its only child. A process adds what lies within its parts; the nodes that remain are exchanged.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from equipoise.interop.torch import foreach
from equipoise.parallel.communication.processes import Processes

__all__ = ["GradientTree", "Gradients", "added", "give_gradients", "take_gradients"]

# Gradients of the parameters, in their order; None where a parameter has none.
Gradients = list[Tensor | None]
# What other processes need to know of a gradient: nothing of a dense one; of a sparse one the number of its dimensions
# that are sparse, and of its entries. None: there is no gradient.
Form = tuple[int, ...] | None
# The first part of a sum, the number of parts below its node, and the forms of its gradients.
FormsOfSum = tuple[int, int, list[Form]]


class _Sum(NamedTuple):
    """The sum of neighbouring parts below a node of the tree.

    Attributes:
        first: The first part.
        size: The number of parts below the node, a power of two; those after the last part do not exist.
        gradients: The sum of their gradients.
    """

    first: int
    size: int
    gradients: Gradients


class GradientTree:
    """Adds the gradients of the parts of a step.

    Args:
        leaves: The number of parts of a step.
        processes: The processes.
    """

    def __init__(self, leaves: int, processes: Processes) -> None:
        self._leaves = leaves
        self._processes = processes
        # The sums of this process in the present step, in the order of their parts.
        self._sums: list[_Sum] = []

    def add(self, part: int, gradients: Gradients) -> None:
        """Add the gradients of a part of this process; parts come in their order.

        Args:
            part: The number of the part.
            gradients: Its gradients, which the tree may change.
        """
        self._add_sum(_Sum(part, 1, gradients))

    def _add_sum(self, last: _Sum) -> None:
        """Add the next sum to those before it, as far as the tree has them below one node."""
        first, size, gradients = last
        while size < self._leaves:
            is_right_child = first // size % 2 == 1
            if is_right_child:
                sibling = (first - size, size)
                if not self._sums or self._sums[-1][:2] != sibling:
                    break
                left = self._sums.pop()
                first = left.first
                gradients = added(left.gradients, gradients)
            elif first + size < self._leaves:
                # Its sibling comes later.
                break
            size *= 2
        self._sums.append(_Sum(first, size, gradients))

    def forms(self) -> list[FormsOfSum]:
        """Return the place of each sum of this process in the tree, and the forms of its gradients."""
        forms = []
        for first, size, gradients in self._sums:
            forms.append((first, size, [_form_of(gradient) for gradient in gradients]))
        return forms

    def clear(self) -> None:
        """Forget the sums of a step that failed."""
        self._sums = []

    def total(self, like: Sequence[Tensor], forms: Sequence[list[FormsOfSum]]) -> Gradients:
        """Return the sum over all parts of all processes, the same in each of them, and begin the next step.

        Args:
            like: The parameters.
            forms: The `forms` of each process, by rank.
        """
        if self._processes.world_size > 1:
            self._exchange(like, forms)
        (total,) = self._sums
        self._sums = []
        return total.gradients

    def _exchange(self, like: Sequence[Tensor], forms: Sequence[list[FormsOfSum]]) -> None:
        """Add the sums of all processes, as one process would go on from there."""
        own_sums = self._sums
        self._sums = []
        for rank, forms_of_process in enumerate(forms):
            for number, (first, size, forms_of_sum) in enumerate(forms_of_process):
                gradients: Gradients = [None] * len(like)
                if rank == self._processes.rank:
                    gradients = own_sums[number].gradients
                received = []
                for gradient, parameter, form in zip(gradients, like, forms_of_sum, strict=True):
                    received.append(_exchanged(gradient, parameter, form, rank))
                self._add_sum(_Sum(first, size, received))


def take_gradients(parameters: Sequence[Tensor]) -> Gradients:
    """Take the gradients from parameters, in a form that is the same in all processes.

    A dense one is laid out as its parameter, since the order of a later sum follows the memory. A sparse one has one
    entry for each index.
    """
    gradients: Gradients = []
    for parameter in parameters:
        gradient = parameter.grad
        parameter.grad = None
        if gradient is not None and gradient.is_sparse:
            gradient = gradient.coalesce()
        elif gradient is not None and gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
        gradients.append(gradient)
    return gradients


def give_gradients(parameters: Sequence[Tensor], gradients: Gradients) -> None:
    """Set the gradients of parameters."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def added(left: Gradients, right: Gradients) -> Gradients:
    """Return left plus right, where dense gradients on the left are changed; one that only one of them has is that one.

    At most two numbers are added for each entry of a sparse gradient, so their order does not count.
    """
    sums: Gradients = []
    targets = []
    values = []
    for one, other in zip(left, right, strict=True):
        if one is None or other is None:
            sums.append(one if other is None else other)
        elif one.is_sparse and other.is_sparse:
            sums.append((one + other).coalesce())
        else:
            # A sparse gradient is added to a dense one, whichever is on the left.
            dense, value = sorted((one, other), key=attrgetter("is_sparse"))
            sums.append(dense)
            targets.append(dense)
            values.append(value)
    foreach.add_(targets, values)
    return sums


def _form_of(gradient: Tensor | None) -> Form:
    if gradient is None:
        return None
    if not gradient.is_sparse:
        return ()
    return (gradient.sparse_dim(), gradient.values().size(0))


def _exchanged(gradient: Tensor | None, parameter: Tensor, form: Form, rank: int) -> Tensor | None:
    """Return the gradient of a process, in every process.

    Args:
        gradient: The gradient in that process; None in others.
        parameter: The parameter.
        form: The form of the gradient.
        rank: The rank of the process.
    """
    if form is None:
        return None
    # 1. A dense gradient.
    if not form:
        if gradient is None:
            gradient = torch.empty_like(parameter)
        return _from_rank(gradient, rank)

    # 2. The indices and the values of a sparse one.
    dimensions, entries = form
    if gradient is None:
        indices = torch.empty(dimensions, entries, dtype=torch.int64, device=parameter.device)
        values = parameter.new_empty(entries, *parameter.shape[dimensions:])
    else:
        indices = gradient.indices()
        values = gradient.values()
    indices = _from_rank(indices, rank)
    values = _from_rank(values, rank)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, is_coalesced=True)


def _from_rank(tensor: Tensor, rank: int) -> Tensor:
    """Return the tensor of a process, in every process."""
    # A broadcast sends memory in its order; where a copy is sent, it is copied back.
    sent = tensor.detach().contiguous()
    dist.broadcast(sent, rank)
    if sent.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(sent)
    return tensor
