"""Side effects of a forward, which a symbolic trace would lose."""

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.interop.torch.modules import buffers_of, versions

__all__ = ["ForwardEffects"]


@dataclass
class _BufferState:
    """A buffer as it was.

    Attributes:
        module: Its module.
        name: Its name there.
        tensor: The buffer itself.
        version: Its version counter, which every write increases.
        values: A copy of its values.
    """

    module: nn.Module
    name: str
    tensor: Tensor
    version: list[int] | None
    values: Tensor

    def has_changed(self) -> bool:
        """Return True if the buffer was written to."""
        return versions([self.tensor]) != self.version

    def ignore_writes(self) -> None:
        """Take the present version for the one at the beginning."""
        self.version = versions([self.tensor])


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
        # 1. The objects in attributes and buffers.
        self._attributes: list[tuple[nn.Module, dict[str, Any]]] = []
        self._buffers: list[tuple[nn.Module, dict[str, Tensor | None]]] = []
        for submodule in module.modules():
            attributes = dict(vars(submodule))
            buffers = dict(buffers_of(submodule))
            self._attributes.append((submodule, attributes))
            self._buffers.append((submodule, buffers))

        # 2. The values of buffers.
        self._buffer_states: list[_BufferState] = []
        for submodule, buffers in self._buffers:
            for name, buffer in buffers.items():
                if buffer is None:
                    continue
                state = _BufferState(
                    module=submodule,
                    name=name,
                    tensor=buffer,
                    version=versions([buffer]),
                    values=buffer.detach().clone(),
                )
                self._buffer_states.append(state)

        # 3. Random generators. NumPy has none to note before it is imported.
        self._python_state = random.getstate()
        self._torch_state = torch.get_rng_state()
        self._numpy_random = sys.modules.get("numpy.random")
        self._numpy_state: Any = None
        if self._numpy_random is not None:
            self._numpy_state = self._numpy_random.get_state()

    def describe(self) -> str:
        """Return the first change as a predicate, such as "sets the attribute 'x' of Block"; empty if there is none."""
        for module, before in self._attributes:
            name = _first_difference(before, vars(module))
            if name is not None:
                return f"sets the attribute {name!r} of {type(module).__name__}"
        for module, buffers in self._buffers:
            name = _first_difference(buffers, buffers_of(module))
            if name is not None:
                return f"sets the buffer {name!r} of {type(module).__name__}"
        for state in self._buffer_states:
            if state.has_changed():
                return f"changes the buffer {state.name!r} of {type(state.module).__name__}"
        if self._has_drawn():
            return "draws random numbers that decide what it does"
        return ""

    def _has_drawn(self) -> bool:
        """Return True if random numbers were drawn."""
        if random.getstate() != self._python_state:
            return True
        if not torch.equal(torch.get_rng_state(), self._torch_state):
            return True
        if self._numpy_random is None:
            return False
        # NumPy's state is a tuple with the generator's name, its keys, and its position among them.
        _, keys, position, *_ = self._numpy_random.get_state()
        _, keys_before, position_before, *_ = self._numpy_state
        if position != position_before:
            return True
        has_new_keys = keys != keys_before
        return bool(has_new_keys.any())

    def restore(self) -> None:
        """Undo all changes."""
        for module, before in self._attributes:
            attributes = vars(module)
            attributes.clear()
            attributes.update(before)
        for module, buffers_before in self._buffers:
            buffers = buffers_of(module)
            buffers.clear()
            buffers.update(buffers_before)
        for state in self._buffer_states:
            if state.has_changed():
                # Nothing but inference mode may write to an inference tensor.
                is_inference = state.tensor.is_inference()
                with torch.inference_mode(is_inference), torch.no_grad():
                    state.tensor.copy_(state.values)
        random.setstate(self._python_state)
        torch.set_rng_state(self._torch_state)
        if self._numpy_random is not None:
            self._numpy_random.set_state(self._numpy_state)

    def ignore(self, inner: "ForwardEffects") -> None:
        """Ignore version bumps that `inner.restore()` already undid.

        Args:
            inner: Effects of a submodule. Buffers that had changed before it began stay changed.
        """
        versions_at_begin = {id(state.tensor): state.version for state in inner._buffer_states}
        for state in self._buffer_states:
            version_at_begin = versions_at_begin.get(id(state.tensor))
            if version_at_begin == state.version:
                state.ignore_writes()


def _first_difference(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """Return the first name that is new, or names another object than before; None if there is none."""
    for name, value in now.items():
        if name not in before or value is not before[name]:
            return name
    return None
