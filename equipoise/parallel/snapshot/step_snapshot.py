"""Snapshot of what a step may change beside parameters and gradients: buffers, metrics, random state.

Noted in every step while recovery is armed, so it must cost little: numpy's generator, whose state takes 30 µs to read,
is looked at as raw memory and read only if it has moved; buffers are copied in one operation. BatchNorm changes its
statistics without a trace in their version counters, so they are always copied.
"""

import ctypes
import random
import struct
import sys
from collections.abc import Callable, Sequence
from functools import partial
from operator import getitem, is_not, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from equipoise.interop.metrics import MetricState, restore_metric_state, take_metric_state
from equipoise.interop.torch import foreach
from equipoise.interop.torch.modules import buffers_of

__all__ = ["StepSnapshot"]

_WORDS = 625  # of a Mersenne twister: its state of 624, and a position


class StepSnapshot:
    """Notes random generators, buffers and metrics, and brings them back.

    Args:
        module: The user's module, on its device.
        devices: The devices it is computed on.

    Example:
        >>> layer = nn.BatchNorm1d(2)
        >>> rewind = StepSnapshot(layer, [torch.device("cpu")])
        >>> rewind.mark()
        >>> _ = layer(torch.rand(3, 2))
        >>> rewind.restore()
        >>> layer.running_mean
        tensor([0., 0.])
    """

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        self._cuda = sorted({device.index or 0 for device in devices if device.type == "cuda"})
        owners: list[dict[str, Any]] = [buffers_of(part) for part in module.modules()]
        places = [(owner, name) for owner in owners for name, buffer in owner.items() if buffer is not None]
        self._owners, self._names = [owner for owner, _ in places], [name for _, name in places]
        self._metrics = [part for part in module.modules() if isinstance(part, Metric)]
        self._python = _of_python()
        self._generator, self._numpy = _of_numpy()
        self._buffers: list[Tensor] = []
        self._groups: list[_Group] = []
        self._states: list[MetricState] = []

    def mark(self) -> None:
        """Notes how everything is now."""
        self._cpu_state = torch.get_rng_state()
        self._cuda_states = [torch.cuda.get_rng_state(index) for index in self._cuda]
        self._python.mark()
        numpy: Any = sys.modules.get("numpy.random")
        if numpy is not None:
            if numpy.get_bit_generator() is not self._generator:  # imported since, or exchanged
                self._generator, self._numpy = _of_numpy()
            self._numpy.mark()
        if self._names:
            self._copy_buffers()
        if self._metrics:
            self._states = [_state_of(metric) for metric in self._metrics]

    def _copy_buffers(self) -> None:
        buffers: list[Tensor] = list(map(getitem, self._owners, self._names))
        if len(buffers) != len(self._buffers) or any(map(is_not, buffers, self._buffers)):
            self._groups, self._buffers = _grouped(buffers), buffers
        with torch.no_grad():
            try:
                self._mark_groups()
            except RuntimeError:  # one was given another value by `.data`, of another kind
                self._groups = _grouped(buffers)
                self._mark_groups()

    def _mark_groups(self) -> None:
        for group in self._groups:
            group.mark(self._buffers)

    def restore(self) -> None:
        """Brings everything back to how it was."""
        torch.set_rng_state(self._cpu_state)
        for index, state in zip(self._cuda, self._cuda_states, strict=True):
            torch.cuda.set_rng_state(state, index)
        random.setstate(self._python.state)
        if self._numpy.state is not None:
            numpy: Any = sys.modules["numpy.random"]
            if numpy.get_bit_generator() is not self._generator:
                numpy.set_bit_generator(self._generator)
            numpy.set_state(self._numpy.state)
        with torch.no_grad():
            for group in self._groups:
                group.restore(self._buffers)
        for owner, name, buffer in zip(self._owners, self._names, self._buffers, strict=True):
            owner[name] = buffer  # a step may have put another one there
        for metric, gathered in zip(self._metrics, self._states, strict=True):
            restore_metric_state(metric, _copied(gathered))


class _Group:
    """Copies of buffers of one dtype and device; of small ones in one tensor, by one operation.

    Args:
        buffers: All buffers.
        indices: Which of them are in the group.
    """

    def __init__(self, buffers: list[Tensor], indices: list[int]) -> None:
        self._members: Callable[[list[Tensor]], list[Tensor] | tuple[Tensor, ...]] = (
            itemgetter(*indices) if len(indices) > 1 else itemgetter(slice(indices[0], indices[0] + 1))
        )
        members = self._members(buffers)
        self._joins = {0: torch.stack, 1: torch.cat}.get(members[0].ndim)
        if self._joins is None:
            self._copies = [torch.empty_like(member) for member in members]
            return
        self._whole = self._joins(members)
        sizes = [member.numel() for member in members]
        self._copies = list(torch.split(self._whole, sizes) if members[0].ndim else self._whole.unbind())

    def mark(self, buffers: list[Tensor]) -> None:
        """Copies the group's buffers."""
        members = self._members(buffers)
        if self._joins is None:
            foreach.copy_(self._copies, members)
        else:
            self._joins(members, out=self._whole)

    def restore(self, buffers: list[Tensor]) -> None:
        """Copies them back."""
        foreach.copy_(self._members(buffers), self._copies)


def _grouped(buffers: list[Tensor]) -> list[_Group]:
    groups: dict[tuple[int, torch.dtype, torch.device], list[int]] = {}
    for index, buffer in enumerate(buffers):
        groups.setdefault((min(buffer.ndim, 2), buffer.dtype, buffer.device), []).append(index)
    with torch.no_grad():
        return [_Group(buffers, indices) for indices in groups.values()]


def _state_of(metric: Metric) -> MetricState:
    state = take_metric_state(metric)
    restore_metric_state(metric, state)
    return _copied(state)


def _copied(state: MetricState) -> MetricState:
    """The same, tensors and lists copied, since updates change them in place."""
    return {
        name: value.detach().clone() if isinstance(value, Tensor) else list(value) if isinstance(value, list) else value
        for name, value in state.items()
    }


class _Twister:
    """A global Mersenne twister: read whole only if its memory has changed.

    A draw moves its position, and 624 of them, after which that is where it was, give every word another value; so the
    position and two words tell, which takes a cache line or two where the whole would take forty.

    Args:
        address: Where its 625 words lie. 0: nobody knows, so it is always read whole.
        position: Which of them is the position; the others are the state.
        read: Returns the whole state.
        holds_spare: Whether a state holds a number that was drawn in advance.

    Attributes:
        state: What `read` returned; None before the first mark.
    """

    def __init__(
        self, address: int, position: int, read: Callable[[], Any], holds_spare: Callable[[Any], bool]
    ) -> None:
        self._read, self._holds_spare = read, holds_spare
        self._words = (ctypes.c_uint32 * _WORDS).from_address(address) if address else None
        self._watched = [position, *([1, 2] if position == 0 else [0, 1])]
        self._seen: tuple[int, ...] = ()
        self._spare = True
        self.state: Any = None

    def mark(self) -> None:
        """Notes the state."""
        words, (position, first, second) = self._words, self._watched
        seen = () if words is None else (words[position], words[first], words[second])
        # A number that was drawn in advance and kept may be used up without a trace in the twister.
        if not seen or seen != self._seen or self._spare:
            self._seen, self.state = seen, self._read()
            self._spare = self._holds_spare(self.state)


def _of_python() -> _Twister:
    """That of `random`, whose object holds a position and the words, right behind what every object begins with."""
    generator: Any = random.getstate.__self__  # type: ignore[attr-defined]
    address = id(generator) + object.__basicsize__
    *words, position = generator.getstate()[1]
    if generator.__sizeof__() < object.__basicsize__ + 4 * _WORDS or (
        struct.unpack("=I624I", ctypes.string_at(address, 4 * _WORDS)) != (position, *words)
    ):
        address = 0  # another Python, another layout
    return _Twister(address, 0, random.getstate, lambda state: state[2] is not None)


def _of_numpy() -> tuple[Any, _Twister]:
    """The generator behind numpy's global functions, and its state; None where nobody has imported them."""
    module: Any = sys.modules.get("numpy.random")
    if module is None:
        return None, _Twister(0, 0, dict, bool)
    generator = module.get_bit_generator()
    address = generator.ctypes.state_address if type(generator).__name__ == "MT19937" else 0
    read = partial(module.get_state, legacy=False)
    return generator, _Twister(address, _WORDS - 1, read, lambda state: bool(state.get("has_gauss")))
