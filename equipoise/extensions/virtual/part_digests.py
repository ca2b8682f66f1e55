"""Digests of what a part of a step computes, and the first tensor between modules by which two computations differ."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

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
        digests[name] = "" if tensor is None else _digest(tensor)
    return digests


def _digest(tensor: Tensor) -> str:
    """Return a digest of the bits of a tensor."""
    tensor = tensor.detach()
    parts = [tensor]
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        parts = [tensor.indices(), tensor.values()]
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    for part in parts:
        values = part.resolve_conj().resolve_neg()
        flat = values.contiguous().reshape(-1)
        array = flat.view(torch.uint8).numpy(force=True)
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
    """Note inputs and outputs of all modules, and gradients of inputs, in a `with` block.

    Args:
        module: The module; its submodules count, too.
        is_on: Whether anything is noted.
    """
    events: list[Event] = []
    handles: list[Any] = []

    def note(what: str, label: str, value: Any) -> None:
        for tensor in tensors_in(value):
            event = (f"{what} of {label}", _digest(tensor))
            events.append(event)

    def before(label: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        note("the input", label, [args, kwargs])
        # Not a hook of the backward of modules, which refuses changes in place.
        hook = partial(note, "the gradient of the input", label)
        tensor: Any
        for tensor in tensors_in([args, kwargs]):
            if tensor.requires_grad:
                handle = tensor.register_hook(hook)
                handles.append(handle)

    def after(label: str, module: nn.Module, args: Any, output: Any) -> None:
        note("the output", label, output)

    modules = module.named_modules() if is_on else ()
    for name, part in modules:
        label = type(part).__name__
        if name:
            label = f"{name!r}, of type {label}"
        before_part = part.register_forward_pre_hook(partial(before, label), with_kwargs=True)
        after_part = part.register_forward_hook(partial(after, label))
        handles += [before_part, after_part]
    try:
        yield events
    finally:
        for handle in handles:
            handle.remove()


def first_difference(one: Sequence[Event], other: Sequence[Event]) -> str:
    """Return a sentence on the first event that differs."""
    for here, there in zip_longest(one, other):
        if here != there:
            what, _ = here or there
            return f"The first difference between modules is {what}."
    return "Inputs and outputs of modules, and gradients of inputs, are the same."
