"""Snapshots of buffers: all of a module, copied quickly; or one, to see whether it is written to.

BatchNorm changes its statistics without a change of their versions, so a snapshot of all buffers always copies them.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from operator import getitem, is_not, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.interop.torch import foreach
from equipoise.interop.torch.modules import buffers_of, versions

__all__ = ["Buffers", "NotedBuffer", "note_buffers"]

Selection = list[Tensor] | tuple[Tensor, ...]
Selector = Callable[[list[Tensor]], Selection]
Join = Callable[..., Tensor]
# A module's dictionary of its direct buffers; a value may be None.
Registered = dict[str, Any]
# Number of dimensions, where all from 2 count as 2; dtype; device; whether they were made in inference mode.
Kind = tuple[int, torch.dtype, torch.device, bool]
# A count of writes; None if the buffer has none.
Version = list[int] | None


# All buffers


class Buffers:
    """Notes the buffers of a module and their values, and restores both. Small buffers are copied by one operation.

    Args:
        module: The module; its submodules count, too.
    """

    def __init__(self, module: nn.Module) -> None:
        # The dictionary and the name of each buffer. A buffer that several modules have stands here once for each.
        self._owners: list[Registered] = []
        self._names: list[str] = []
        for part in module.modules():
            owner = buffers_of(part)
            for name, buffer in owner.items():
                if buffer is not None:
                    self._owners.append(owner)
                    self._names.append(name)
        self._buffers: list[Tensor] = []
        # The copies. They are created once, and again if the buffers are others than at the last mark.
        self._groups: list[_BufferGroup] = []

    def mark(self) -> None:
        """Note the present buffers and their values."""
        if not self._names:
            return
        buffers: list[Tensor] = list(map(getitem, self._owners, self._names))
        has_new_count = len(buffers) != len(self._buffers)
        if has_new_count or any(map(is_not, buffers, self._buffers)):
            self._groups = _grouped(buffers)
            self._buffers = buffers
        with torch.no_grad():
            try:
                self._mark_groups()
            except RuntimeError:
                # A buffer may have another shape or dtype now, by its `.data`.
                self._groups = _grouped(buffers)
                self._mark_groups()

    def _mark_groups(self) -> None:
        for group in self._groups:
            group.mark(self._buffers)

    def shapes(self) -> list[tuple[str, torch.Size]]:
        """Return the name and the shape of each buffer at the last mark."""
        return [(name, buffer.shape) for name, buffer in zip(self._names, self._buffers, strict=True)]

    def restore(self) -> None:
        """Restore the values, and then the tensors themselves, which a step may have replaced."""
        with torch.no_grad():
            for group in self._groups:
                group.restore(self._buffers)
        slots = zip(self._owners, self._names, self._buffers, strict=True)
        for owner, name, buffer in slots:
            owner[name] = buffer


class _BufferGroup:
    """Copies of buffers of one dtype and device. Small buffers are copied into one tensor, by one operation."""

    def __init__(self, buffers: list[Tensor], indices: list[int]) -> None:
        # 1. A function that selects the group's buffers, always as a list or tuple.
        self._members: Selector
        if len(indices) > 1:
            self._members = itemgetter(*indices)
        else:
            index = indices[0]
            only_index = slice(index, index + 1)
            self._members = itemgetter(only_index)
        members = self._members(buffers)
        self._are_of_inference = members[0].is_inference()

        # 2. Large buffers are copied one by one.
        ndim = members[0].ndim
        joins: dict[int, Join] = {
            0: torch.stack,
            1: torch.cat,
        }
        self._join = joins.get(ndim)
        if self._join is None:
            self._copies = list(map(torch.empty_like, members))
            return

        # 3. Small ones in one tensor, of which the copies are views.
        self._joined = self._join(members)
        if ndim == 0:
            views = self._joined.unbind()
        else:
            views = torch.split(self._joined, [member.numel() for member in members])
        self._copies = list(views)

    def mark(self, buffers: list[Tensor]) -> None:
        """Copy the group's buffers."""
        members = self._members(buffers)
        if self._join is None:
            foreach.copy_(self._copies, members)
        else:
            self._join(members, out=self._joined)

    def restore(self, buffers: list[Tensor]) -> None:
        """Copy the values back."""
        # Tensors that were made in inference mode are written to in that mode alone.
        with torch.inference_mode() if self._are_of_inference else nullcontext():
            foreach.copy_(self._members(buffers), self._copies)


def _grouped(buffers: list[Tensor]) -> list[_BufferGroup]:
    """Group buffers by their kind."""
    # 1. Divide the buffers.
    indices_by_kind: dict[Kind, list[int]] = {}
    for index, buffer in enumerate(buffers):
        kind = (min(buffer.ndim, 2), buffer.dtype, buffer.device, buffer.is_inference())
        indices_by_kind.setdefault(kind, []).append(index)
    # 2. Allocate the copies.
    with torch.no_grad():
        return [_BufferGroup(buffers, indices) for indices in indices_by_kind.values()]


# One buffer


@dataclass
class NotedBuffer:
    """A buffer as it was.

    Attributes:
        module: Its module.
        name: Its name there.
        buffer: The buffer itself; None: the name had none.
        version: Its version, which every write increases; None: it has no version.
        values: A copy of its values.
    """

    module: nn.Module
    name: str
    buffer: Tensor | None
    version: Version
    values: Tensor | None

    def has_changed(self) -> bool:
        """Return True if the buffer was written to or replaced."""
        present_buffer = buffers_of(self.module).get(self.name)
        if present_buffer is not self.buffer:
            return True
        present_version = _version_of(self.buffer)
        if present_version is None and self.buffer is not None:
            assert self.values is not None
            return not torch.equal(self.buffer, self.values)
        return present_version != self.version


def note_buffers(module: nn.Module) -> list[NotedBuffer]:
    """Return every direct buffer of a module, as it is."""
    noted = []
    for name, buffer in buffers_of(module).items():
        version = _version_of(buffer)
        values = None
        if buffer is not None:
            values = buffer.detach().clone()
        noted.append(NotedBuffer(module, name, buffer, version, values))
    return noted


def _version_of(buffer: Tensor | None) -> Version:
    if buffer is None:
        return None
    return versions([buffer])
