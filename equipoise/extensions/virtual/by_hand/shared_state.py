"""Gradients and groups of optimisers, which all parts of a process have in common after a call."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.extensions.virtual.parts.gradient_tree import Gradients, give_gradients
from equipoise.extensions.virtual.parts.refusals import is_other_option
from equipoise.interop.torch.modules import versions
from equipoise.parallel.communication.tensor_copies import dense_members

__all__ = ["SharedState"]


class SharedState:
    """Gradients and groups of the first part after a call. Other parts receive the same, also where it changes them."""

    def __init__(self, parameters: Sequence[nn.Parameter], optimizers: Sequence[Optimizer]) -> None:
        self._parameters = parameters
        self._gradients: Gradients = []
        self._copies: Gradients = []
        self._versions: list[int] | None = None
        # What the part that runs has received.
        self._given: Gradients = []
        self._given_versions: list[int] | None = None
        self._groups: list[dict[str, Any]] = []
        for optimizer in optimizers:
            self._groups += optimizer.param_groups
        self._values: list[dict[str, Any]] = []

    def share(self) -> None:
        """Note what the first part has now."""
        self._gradients = [parameter.grad for parameter in self._parameters]
        self._copies = _copied(self._gradients)
        self._versions = _versions_of(self._gradients)
        self._note_given(self._gradients)
        self._values = [dict(group) for group in self._groups]

    def give(self) -> None:
        """Give it to the part that runs next."""
        gradients = self._gradients
        present = _versions_of(gradients)
        # Without versions they count as changed.
        if present is None or present != self._versions:
            gradients = _copied(self._copies)
        give_gradients(self._parameters, gradients)
        self._note_given(gradients)
        self.give_options()

    def give_options(self) -> None:
        """Give the groups alone, such as their learning rate."""
        for group, values in zip(self._groups, self._values, strict=True):
            group.clear()
            group.update(values)

    def _note_given(self, gradients: Gradients) -> None:
        self._given = gradients
        self._given_versions = _versions_of(gradients)

    def changes(self) -> str:
        """Return the end of a phrase on what the part that runs has changed; it differs where the changes do."""
        text = self.changes_of_groups()
        # 1. The gradients that the part has received, in the versions that it has received.
        present = [parameter.grad for parameter in self._parameters]
        pairs = zip(present, self._given, strict=True)
        are_same = all(one is other for one, other in pairs)
        versions_now = _versions_of(present)
        if are_same and versions_now is not None and versions_now == self._given_versions:
            return text

        # 2. Other ones.
        digests = list(map(_digest_of, present))
        text_of_digests = repr(digests)
        encoded = text_of_digests.encode()
        digest = hashlib.sha256(encoded).hexdigest()
        beginning = digest[:12]
        return f"{text} with gradients that it has changed (digest {beginning})"

    def changes_of_groups(self) -> str:
        """Return the same for groups alone, such as their learning rate."""
        changes = {}
        pairs = zip(self._groups, self._values, strict=True)
        for index, (group, values) in enumerate(pairs):
            for name, value in group.items():
                if name == "params":
                    continue
                before = values.get(name)
                if is_other_option(value, before):
                    changes[f"{name} of group {index}"] = value
        if not changes:
            return ""
        return f" with {changes}"


def _versions_of(gradients: Gradients) -> list[int] | None:
    return versions(gradient for gradient in gradients if gradient is not None)


def _copied(gradients: Gradients) -> Gradients:
    copies: Gradients = []
    for gradient in gradients:
        if gradient is not None:
            gradient = gradient.detach().clone()
        copies.append(gradient)
    return copies


def _digest_of(gradient: Tensor | None) -> str:
    """Return a digest of the dtype, the shape and all bits of a gradient; empty if there is none."""
    if gradient is None:
        return ""
    gradient = gradient.detach()
    if gradient.layout is torch.sparse_coo:
        gradient = gradient.coalesce()
    shape = tuple(gradient.shape)
    kind = f"{gradient.dtype} {shape}"
    encoded = kind.encode()
    digest = hashlib.sha256(encoded)
    members = dense_members(gradient)
    for member in members:
        values = member.resolve_conj()
        values = values.resolve_neg()
        values = values.contiguous()
        flat = values.reshape(-1)
        as_bytes = flat.view(torch.uint8)
        array = as_bytes.numpy(force=True)
        digest.update(array.data)
    return digest.hexdigest()
