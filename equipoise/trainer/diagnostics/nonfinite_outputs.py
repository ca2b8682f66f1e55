"""Find the first module whose output is not finite: `Trainer(detect_nonfinite=True)`.

Forward hooks note, on the device, whether the inputs, parameters and outputs of each module call are finite. The notes
are read only for a step whose loss is not finite.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from equipoise.parallel.batches.splitting import entries_of

__all__ = ["NonFiniteOutputs"]


class _Call(NamedTuple):
    """Notes on one call of a module.

    Attributes:
        module: The module.
        outputs, inputs, parameters: Flags on the device, true where a value is not finite.
    """

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
        """Begin to watch. Replicas and modules of later steps are watched, too, so the hook is one for all modules."""
        self._handle = nn.modules.module.register_module_forward_hook(self._note)

    def stop(self) -> None:
        """Watch no longer."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = None
        self.clear()

    def clear(self) -> None:
        """Forget the calls of the last step."""
        self._calls.clear()

    def first(self) -> str | None:
        """Describe the first call of this step whose output is not finite; None if all were finite."""
        for call in self._calls:
            if not _any(call.outputs):
                continue
            name = self._names.get(call.module)
            kind = type(call.module).__name__
            described = f"{name!r} ({kind})" if name else f"a {kind}"
            return f"The first output that is not finite came from {described}; {_cause(call)}."
        return None

    def _note(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():  # an evaluation in between, which is no part of the step
            return
        with torch.no_grad():
            outputs = list(_flags(tensor for _, tensor in entries_of(output)))
            if outputs:
                inputs = list(_flags(tensor for _, tensor in entries_of(args)))
                parameters = list(_flags(module.parameters(recurse=False)))
                self._calls.append(_Call(module, outputs, inputs, parameters))


def _flags(tensors: Iterable[Tensor]) -> Iterable[Tensor]:
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            yield torch.isfinite(tensor).logical_not().any()


def _any(flags: list[Tensor]) -> bool:
    return any(bool(flag) for flag in flags)


def _cause(call: _Call) -> str:
    """Say what the module computed it from."""
    if _any(call.parameters):
        return "its parameters were not finite any more, so an earlier step spoiled them"
    if _any(call.inputs):
        return "its input was not finite either, so an operation between two modules made it so"
    return "its input and its parameters were finite"
