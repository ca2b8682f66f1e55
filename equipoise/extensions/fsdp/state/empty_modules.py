"""Modules that are made without memory for their parameters."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import get_ident
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from equipoise.parallel.communication.tensor_copies import give_memory
from equipoise.tree import map_leaves, tensors_in

__all__ = ["ParametersOnMeta"]


class ParametersOnMeta(TorchFunctionMode):
    """A context in which new parameters of modules are on the meta device, and so are results that depend on them.

    No checkpoint has the values of all other tensors, so these stay on their device.
    """

    def __enter__(self) -> "ParametersOnMeta":
        # Such a hook is called in all threads, but other threads are not within this context.
        self._thread = get_ident()
        self._hook = register_module_parameter_registration_hook(self._take_memory)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._hook.remove()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        try:
            return function(*arguments, **options)
        except RuntimeError:
            # Torch computes nothing with tensors of both devices, and refuses `weight.data = values`.
            are_on_meta = {tensor.is_meta for tensor in tensors_in((arguments, options))}
            if are_on_meta != {True, False} or _changes_values(function, arguments, options):
                raise
        arguments, options = map_leaves(_on_meta, (arguments, options))
        return function(*arguments, **options)

    def _take_memory(self, module: nn.Module, name: str, parameter: Any) -> None:
        """Move a new parameter to the meta device."""
        if type(parameter) is not nn.Parameter or parameter.is_meta or get_ident() != self._thread:
            return
        # Torch exchanges no tensor that has views or weak references. Such a parameter keeps its memory.
        with suppress(RuntimeError):
            give_memory(parameter, parameter.to("meta"))


def _changes_values(function: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Return True if a function may write to a tensor with values, which must not be done to a copy."""
    is_in_place = getattr(function, "__name__", "").endswith("_") or "out" in options
    if not is_in_place:
        return False
    first = arguments[0] if arguments else None
    # A tensor on meta has no values to change.
    return not (isinstance(first, Tensor) and first.is_meta)


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to("meta")
    return value
