"""The structure of a module: which modules, parameters and buffers are registered in it."""

from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor, nn

from equipoise.interop.torch.modules import buffers_of, children_of, parameters_of

__all__ = ["ModuleStructure"]

# The dictionary of a module's buffers.
Buffers = dict[str, Tensor | None]


class ModuleStructure:
    """Notes what is registered in some modules, and compares it with what is registered later.

    Args:
        modules: The modules.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        # Dictionaries of parameters and children. They are compared by the identity of their values, and by their
        # lengths, since `map` ends with the shorter of two lists.
        self._registered: list[dict[str, Any]] = [parameters_of(module) for module in modules]
        for module in modules:
            self._registered.append(children_of(module))
        self._objects = list(chain.from_iterable(map(dict.values, self._registered)))
        self._lengths = list(map(len, self._registered))

        # Dictionaries of buffers, which are compared by name: steps may replace a buffer.
        self._buffers = [buffers_of(module) for module in modules]
        # Names of the buffers; None if no module has any, which is quicker to compare.
        self._buffer_names: list[str] | None = None
        has_buffers = any(self._buffers)
        if has_buffers:
            self._buffer_names = _names_of(self._buffers)

    def has_changed(self) -> bool:
        """Return whether modules, parameters or buffers were added, removed or, other than buffers, replaced."""
        lengths = map(len, self._registered)
        if list(lengths) != self._lengths:
            return True
        present = chain.from_iterable(map(dict.values, self._registered))
        same = all(map(is_, present, self._objects))
        if not same:
            return True
        if self._buffer_names is None:
            return any(self._buffers)
        return _names_of(self._buffers) != self._buffer_names


def _names_of(buffers: list[Buffers]) -> list[str]:
    """Return the names of all buffers that are not None."""
    names = []
    for registered in buffers:
        for name, buffer in registered.items():
            if buffer is not None:
                names.append(name)
    return names
