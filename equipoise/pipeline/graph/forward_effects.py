"""Side effects of a forward, which a symbolic trace would lose."""

import torch
from torch import nn

from equipoise.interop.torch.modules import buffers_of
from equipoise.parallel.snapshot.attributes import Attributes
from equipoise.parallel.snapshot.buffers import NotedBuffer, note_buffers
from equipoise.parallel.snapshot.random_state import HostGenerators

__all__ = ["ForwardEffects"]


class ForwardEffects:
    """State that a forward must not change while it is traced: attributes, buffers, and random generators.

    Args:
        module: The module; its buffers are copied.

    Example:
        >>> module = nn.BatchNorm1d(2)
        >>> effects = ForwardEffects(module)
        >>> module.num_batches_tracked += 1
        >>> effects.describe()
        "changes the buffer 'num_batches_tracked' of BatchNorm1d"
        >>> effects.restore()
        >>> module.num_batches_tracked
        tensor(0)
    """

    def __init__(self, module: nn.Module) -> None:
        modules = list(module.modules())
        # The objects in attributes and buffers, and the values of buffers.
        self._attributes = Attributes(modules)
        self._attributes.mark()
        self._buffers = Attributes(modules, buffers_of)
        self._buffers.mark()
        self._buffer_values: list[NotedBuffer] = []
        for submodule in modules:
            self._buffer_values.extend(note_buffers(submodule))
        # Random generators.
        self._generators = HostGenerators()
        self._torch_state = torch.get_rng_state()

    def describe(self) -> str:
        """Return the first change as a predicate, such as "sets the attribute 'x' of Block"; empty if there is none."""
        changed_attribute = self._attributes.first_change()
        if changed_attribute is not None:
            module, name = changed_attribute
            return f"sets the attribute {name!r} of {type(module).__name__}"
        changed_buffer = self._buffers.first_change()
        if changed_buffer is not None:
            module, name = changed_buffer
            return f"sets the buffer {name!r} of {type(module).__name__}"
        for noted in self._buffer_values:
            if noted.has_changed():
                return f"changes the buffer {noted.name!r} of {type(noted.module).__name__}"
        if self._generators.have_moved() or not torch.equal(torch.get_rng_state(), self._torch_state):
            return "draws random numbers that decide what it does"
        return ""

    def restore(self) -> None:
        """Undo all changes."""
        self._attributes.restore()
        self._buffers.restore()
        for noted in self._buffer_values:
            if noted.has_changed():
                noted.restore_values()
        self._generators.restore()
        torch.set_rng_state(self._torch_state)

    def ignore(self, inner: "ForwardEffects") -> None:
        """Ignore version bumps that `inner.restore()` already undid.

        Args:
            inner: Effects of a submodule. Buffers that had changed before it began stay changed.
        """
        versions_at_begin = {}
        for noted in inner._buffer_values:
            versions_at_begin[id(noted.buffer)] = noted.version
        for noted in self._buffer_values:
            version_at_begin = versions_at_begin.get(id(noted.buffer))
            if version_at_begin == noted.version:
                noted.ignore_writes()
