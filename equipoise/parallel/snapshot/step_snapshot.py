"""Snapshot of the state that a step may change beside parameters and gradients: buffers, metrics, random state.

While recovery is armed every step takes one, so it must cost little: the global generators are read only if they have
moved, and buffers are copied in one operation. BatchNorm changes its statistics without a change of their versions, so
they are always copied.
"""

import random
import sys
from collections.abc import Callable, Sequence
from operator import getitem, is_not, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from equipoise.interop.metrics import MetricState, restore_metric_state, take_metric_state
from equipoise.interop.torch import foreach
from equipoise.interop.torch.modules import buffers_of
from equipoise.parallel.snapshot.global_twister import numpy_twister, python_twister

__all__ = ["StepSnapshot"]


Selector = Callable[[list[Tensor]], list[Tensor] | tuple[Tensor, ...]]
Join = Callable[..., Tensor]


class StepSnapshot:
    """Notes random generators, buffers and metrics, and restores them.

    Args:
        module: The user's module, on its device.
        devices: The devices on which it is computed.

    Example:
        >>> layer = nn.BatchNorm1d(2)
        >>> snapshot = StepSnapshot(layer, [torch.device("cpu")])
        >>> snapshot.mark()
        >>> _ = layer(torch.rand(3, 2))
        >>> snapshot.restore()
        >>> layer.running_mean
        tensor([0., 0.])
    """

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        # 1. Random generators.
        cuda_indices = set()
        for device in devices:
            if device.type == "cuda":
                cuda_indices.add(device.index or 0)
        self._cuda = sorted(cuda_indices)
        self._python = python_twister()
        self._bit_generator, self._numpy = numpy_twister()

        # 2. Buffers: the dictionary and the name of each.
        self._owners: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._metrics: list[Metric] = []
        for part in module.modules():
            owner = buffers_of(part)
            for name, buffer in owner.items():
                if buffer is not None:
                    self._owners.append(owner)
                    self._names.append(name)
            if isinstance(part, Metric):
                self._metrics.append(part)
        self._buffers: list[Tensor] = []
        self._groups: list[_BufferGroup] = []

        # 3. Metrics.
        self._metric_states: list[MetricState] = []

    def mark(self) -> None:
        """Note the present state."""
        self._cpu_state = torch.get_rng_state()
        self._cuda_states = [torch.cuda.get_rng_state(index) for index in self._cuda]
        self._python.mark()
        numpy: Any = sys.modules.get("numpy.random")
        if numpy is not None:
            # It may have been imported or exchanged since.
            if numpy.get_bit_generator() is not self._bit_generator:
                self._bit_generator, self._numpy = numpy_twister()
            self._numpy.mark()
        if self._names:
            self._copy_buffers()
        if self._metrics:
            self._metric_states = [_state_of(metric) for metric in self._metrics]

    def _copy_buffers(self) -> None:
        buffers: list[Tensor] = list(map(getitem, self._owners, self._names))
        if len(buffers) != len(self._buffers) or any(map(is_not, buffers, self._buffers)):
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

    def restore(self) -> None:
        """Restore the state at the last mark."""
        # 1. Random generators.
        torch.set_rng_state(self._cpu_state)
        cuda_states = zip(self._cuda, self._cuda_states, strict=True)
        for index, state in cuda_states:
            torch.cuda.set_rng_state(state, index)
        random.setstate(self._python.state)
        if self._numpy.state is not None:
            numpy: Any = sys.modules["numpy.random"]
            if numpy.get_bit_generator() is not self._bit_generator:
                numpy.set_bit_generator(self._bit_generator)
            numpy.set_state(self._numpy.state)

        # 2. Buffers: their values, and then the tensors themselves, which a step may have replaced.
        with torch.no_grad():
            for group in self._groups:
                group.restore(self._buffers)
        slots = zip(self._owners, self._names, self._buffers, strict=True)
        for owner, name, buffer in slots:
            owner[name] = buffer

        # 3. Metrics. The state is copied again, since it may be restored once more.
        metrics = zip(self._metrics, self._metric_states, strict=True)
        for metric, metric_state in metrics:
            metric_state = _copied(metric_state)
            restore_metric_state(metric, metric_state)


class _BufferGroup:
    """Copies of buffers of one dtype and device. Small buffers are copied into one tensor, by one operation.

    Args:
        buffers: All buffers.
        indices: The indices of those in the group.
    """

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

        # 2. Large buffers are copied one by one.
        ndim = members[0].ndim
        joins: dict[int, Join] = {
            0: torch.stack,
            1: torch.cat,
        }
        self._join = joins.get(ndim)
        if self._join is None:
            copies = map(torch.empty_like, members)
            self._copies = list(copies)
            return

        # 3. Small ones in one tensor, of which the copies are views.
        self._joined = self._join(members)
        if ndim == 0:
            views = self._joined.unbind()
        else:
            sizes = [member.numel() for member in members]
            views = torch.split(self._joined, sizes)
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
        members = self._members(buffers)
        foreach.copy_(members, self._copies)


def _grouped(buffers: list[Tensor]) -> list[_BufferGroup]:
    """Group buffers by dtype, device and number of dimensions, where all from 2 count as 2."""
    indices_by_kind: dict[tuple[int, torch.dtype, torch.device], list[int]] = {}
    for index, buffer in enumerate(buffers):
        ndim = min(buffer.ndim, 2)
        kind = (ndim, buffer.dtype, buffer.device)
        indices = indices_by_kind.setdefault(kind, [])
        indices.append(index)
    with torch.no_grad():
        groups = []
        for indices in indices_by_kind.values():
            group = _BufferGroup(buffers, indices)
            groups.append(group)
    return groups


def _state_of(metric: Metric) -> MetricState:
    state = take_metric_state(metric)
    restore_metric_state(metric, state)
    return _copied(state)


def _copied(state: MetricState) -> MetricState:
    """Return the state with copies of tensors and lists, since updates change them in place."""
    copies: MetricState = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            detached = value.detach()
            copies[name] = detached.clone()
        elif isinstance(value, list):
            copies[name] = list(value)
        else:
            copies[name] = value
    return copies
