"""Digests of what a part of a step computes, and the first tensor between modules by which two computations differ."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.parallel.communication.tensor_copies import dense_members
from equipoise.tree import tensors_in

__all__ = ["Digests", "Event", "digests_of", "distance", "first_difference", "watched"]

# Digests of tensors, by what they are; empty where there is none.
Digests = dict[str, str]
# What a tensor is of which module, and its digest.
Event = tuple[str, str]


def digests_of(tensors: dict[str, Tensor | None]) -> Digests:
    """Return the digest of each tensor."""
    digests = {}
    for name, tensor in tensors.items():
        digest = ""
        if tensor is not None:
            digest = _digest(tensor)
        digests[name] = digest
    return digests


def _digest(tensor: Tensor) -> str:
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
    shape = tuple(tensor.shape)
    kind = f"{tensor.dtype} {shape}"
    name = kind.encode()
    digest = hashlib.sha256(name)
    members = dense_members(tensor)
    for member in members:
        values = member.resolve_conj()
        values = values.resolve_neg()
        values = values.contiguous()
        flat = values.reshape(-1)
        as_bytes = flat.view(torch.uint8)
        array = as_bytes.numpy(force=True)
        digest.update(array.data)
    return digest.hexdigest()


def distance(one: Tensor | None, other: Tensor | None) -> str:
    """Return by how much two tensors differ, as the end of a phrase."""
    if one is None and other is None:
        return "the same when computed again"
    if one is None or other is None or one.shape != other.shape:
        return "in one place there is none of this shape"
    # Of any dtype.
    left = one.to_dense().to(torch.complex128)
    right = other.to_dense().to(torch.complex128)
    amount = (left - right).abs().max().item()
    return f"by up to {amount:.2g}" if amount else "the same when computed again"


@contextmanager
def watched(module: nn.Module, *, is_on: bool) -> Iterator[list[Event]]:
    """Note inputs and outputs of all modules, and their gradients, in a `with` block.

    Args:
        module: The module; its submodules count, too.
        is_on: Whether anything is noted.
    """
    watch = _Watch()
    if is_on:
        watch.start(module)
    try:
        yield watch.events
    finally:
        watch.stop()


class _Watch:
    """Hooks on modules, and on the tensors between them.

    Hooks on the backward of a module would refuse changes in place, so its tensors have them.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._handles: list[Any] = []
        # What a tensor is, by its place in the graph, which a change in place changes.
        self._labels: dict[Any, str] = {}

    def start(self, module: nn.Module) -> None:
        for name, part in module.named_modules():
            label = type(part).__name__
            if name:
                label = f"{name!r}, of type {label}"
            before = part.register_forward_pre_hook(partial(self._before, label), with_kwargs=True)
            after = part.register_forward_hook(partial(self._after, label))
            self._handles += [before, after]

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, label: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        for tensor in tensors_in([args, kwargs]):
            self._note(f"the input of {label}", tensor)
            # An output, too, if another module has computed it; its gradient comes from this one.
            self._follow(tensor)
            self._labels[_place_of(tensor)] = f"the gradient of the input of {label}"

    def _after(self, label: str, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            self._note(f"the output of {label}", tensor)
            self._follow(tensor)
            self._labels.setdefault(_place_of(tensor), f"the gradient of the output of {label}")

    def _follow(self, tensor: Any) -> None:
        """Note the gradient of a tensor, once."""
        place = _place_of(tensor)
        if tensor.requires_grad and place not in self._labels:
            handle = tensor.register_hook(partial(self._note_gradient, place))
            self._handles.append(handle)

    def _note_gradient(self, place: Any, gradient: Tensor) -> None:
        self._note(self._labels[place], gradient)

    def _note(self, what: str, tensor: Tensor) -> None:
        event = (what, _digest(tensor))
        self.events.append(event)


def _place_of(tensor: Tensor) -> Any:
    """Return the place of a tensor in the graph; a leaf is its own."""
    node = tensor.grad_fn or tensor
    return node, tensor.output_nr


def first_difference(one: Sequence[Event], other: Sequence[Event]) -> str:
    """Return a sentence on the first event that differs."""
    for here, there in zip_longest(one, other):
        if here != there:
            event = here or there
            what = event[0]
            return f"The first difference between modules is {what}."
    return "Inputs and outputs of modules, and their gradients, are the same."
