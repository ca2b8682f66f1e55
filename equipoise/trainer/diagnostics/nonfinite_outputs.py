"""Find the first module whose output is not finite: `Trainer(detect_nonfinite=True)`.

Forward hooks record, on the device, whether the inputs, parameters and outputs of each module call are finite. The
records are read only for a step whose loss is not finite.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from equipoise.tree import entries_of

__all__ = ["NonFiniteOutputs"]


class _Call(NamedTuple):
    """One call of a module, with a flag on the device for each tensor, true if a value in it is not finite."""

    module: nn.Module
    outputs: list[Tensor]
    inputs: list[Tensor]
    parameters: list[Tensor]


class NonFiniteOutputs:
    """Watches the calls of all submodules.

    Args:
        module: The user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._names = {submodule: name for name, submodule in module.named_modules()}
        self._calls: list[_Call] = []
        self._handle: RemovableHandle | None = None

    def start(self) -> None:
        """Begin to watch."""
        # One hook for all modules, because it includes replicas and modules that a later step creates.
        self._handle = nn.modules.module.register_module_forward_hook(self._record)

    def stop(self) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = None
        self.clear()

    def clear(self) -> None:
        """Forget the calls of the last step."""
        self._calls.clear()

    def first(self) -> str | None:
        """Return a text about the first call of this step whose output is not finite; None if all were finite."""
        for call in self._calls:
            if _any(call.outputs):
                return f"The first output that is not finite came from {self._describe(call.module)}; {_cause(call)}."
        return None

    def _describe(self, module: nn.Module) -> str:
        kind = type(module).__name__
        name = self._names.get(module)
        # A replica has no name.
        return f"{name!r} ({kind})" if name else f"a {kind}"

    def _record(self, module: nn.Module, args: Any, output: Any) -> None:
        # An evaluation between two steps is no part of a step.
        if not torch.is_grad_enabled():
            return
        with torch.no_grad():
            outputs = _flags(tensor for _, tensor in entries_of(output))
            if not outputs:
                return
            inputs = _flags(tensor for _, tensor in entries_of(args))
            parameters = _flags(module.parameters(recurse=False))
            self._calls.append(_Call(module, outputs, inputs, parameters))


def _flags(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return a flag for each tensor that can be infinite; it stays on the device of the tensor."""
    can_be_infinite = (tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex())
    return [torch.isfinite(tensor).logical_not().any() for tensor in can_be_infinite]


def _any(flags: list[Tensor]) -> bool:
    # Reading a flag waits for the device.
    return any(bool(flag) for flag in flags)


def _cause(call: _Call) -> str:
    """Return a text about the values from which the module has computed its output."""
    if _any(call.parameters):
        return "its parameters were not finite any more, so an earlier step spoiled them"
    if _any(call.inputs):
        return "its input was not finite either, so an operation between two modules made it so"
    return "its input and its parameters were finite"
