"""Structure, hooks and versions of the modules and parameters of torch.

Each private name has a comment with the reason why nothing public does.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, gt, methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.interop.adapters import find

__all__ = [
    "STRUCTURE",
    "References",
    "buffers_of",
    "children_of",
    "has_global_hooks",
    "has_gradient_hooks",
    "has_module_hooks",
    "hook_registries_of",
    "hooks_of",
    "is_compiled",
    "parameters_of",
    "set_device_of",
    "shell_of",
    "uncompiled_name",
    "unsaved_buffers_of",
    "versions",
]

# The child in which `torch.compile` keeps the module that it wraps; it becomes a part of the names of parameters.
_COMPILED_CHILD = "_orig_mod"


# A shallow copy needs separate dictionaries; `register_module` and its siblings make checks that are not needed here.
STRUCTURE = ("_parameters", "_buffers", "_modules")
# Nothing public lists or restores the hooks of a module.
_HOOK_REGISTRIES = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
# Nothing public lists the hooks that run with each module.
_has_any_global_hook: Callable[[], bool] | None = find("torch.nn.modules.module._has_any_global_hook")
# The version of a tensor, which grows with changes in place.
_has_versions = find("torch.Tensor._version") is not None
_VERSION = attrgetter("_version")
# Numbers of references to a tensor of C++ and to its memory.
_USE_COUNT = methodcaller("_use_count")
_storage_use_count: Any = find("torch._C._storage_Use_Count")


def has_global_hooks() -> bool:
    """Return True if a hook runs with each module, or torch does not show it."""
    return _has_any_global_hook is None or bool(_has_any_global_hook())


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Return True if a hook runs when the gradient of a parameter is computed; nothing public lists such hooks."""
    return bool(parameter._backward_hooks) or bool(parameter._post_accumulate_grad_hooks)


def shell_of(module: nn.Module) -> nn.Module:
    """Return a copy of a module without parameters, buffers and children; other attributes are shared."""
    shell: nn.Module = object.__new__(type(module))
    attributes = vars(shell)
    attributes.update(vars(module))
    for name in STRUCTURE:
        attributes[name] = {}
    return shell


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dictionary of a module's direct parameters; the caller may write to it."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the dictionary of a module's direct buffers; the caller may write to it."""
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the dictionary of a module's children; the caller may write to it."""
    return module._modules


def unsaved_buffers_of(module: nn.Module) -> list[str]:
    """Return the names of a module's direct buffers that its `state_dict` leaves out.

    Nothing public lists them. Without the name they are not restored in a resumed run.
    """
    return sorted(getattr(module, "_non_persistent_buffers_set", ()))


def versions(tensors: Iterable[Tensor]) -> list[int] | None:
    """Return the version of each tensor, which grows with changes in place; None if one tensor has no version.

    Without versions every tensor counts as changed.
    """
    if not _has_versions:
        return None
    try:
        return list(map(_VERSION, tensors))
    except RuntimeError:
        # Tensors of inference mode have no version.
        return None


class References:
    """Find out whether tensors are in use elsewhere. Nothing public counts the references to a tensor and its memory.

    Args:
        tensors: The tensors.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        # These are addresses. The tensors keep what is there.
        self._memory = [tensor.untyped_storage()._cdata for tensor in self._tensors]
        self._usual: list[int] | None = None

    def are_more(self) -> bool:
        """Return True if there are more references than in the first call."""
        # Objects of Python, those of C++, and views of the same memory.
        counts = [
            *map(sys.getrefcount, self._tensors),
            *map(_USE_COUNT, self._tensors),
            *map(_storage_use_count, self._memory),
        ]
        if self._usual is None:
            self._usual = counts
        return any(map(gt, counts, self._usual))


def is_compiled(module: nn.Module) -> bool:
    """Return True if `torch.compile` or `module.compile()` was applied; only private attributes tell."""
    state = vars(module)
    if "dynamo_ctx" in state:
        return True
    return bool(state.get("_compiled_call_impl") or state.get("_compiler_ctx"))


def uncompiled_name(name: str) -> str:
    """Return the name of a parameter or submodule as it is without `torch.compile`.

    Example:
        >>> uncompiled_name("net._orig_mod.weight")
        'net.weight'
    """
    if _COMPILED_CHILD not in name:
        return name
    return ".".join(part for part in name.split(".") if part != _COMPILED_CHILD)


def set_device_of(module: nn.Module, device: torch.device) -> None:
    """Set `module.device` to the device of its batches, for a module that lies on several devices."""
    state: dict[str, Any] = vars(module)
    # Lightning's modules store here the device of the last call of `to`.
    if "_device" in state:
        state["_device"] = device


def has_module_hooks(module: nn.Module) -> bool:
    """Return True if the user registered a hook on a module's forward or backward."""
    return any(hook_registries_of(module))


def hook_registries_of(module: nn.Module) -> list[dict[int, Any]]:
    """Return the dictionaries that hold the hooks on a module's forward and backward; the caller may write to them."""
    attributes = vars(module)
    return [attributes[name] for name in _HOOK_REGISTRIES if name in attributes]


def hooks_of(parameter: Tensor) -> list[tuple[str, Any]]:
    """Return the hooks on a parameter's gradient, each after the name of the method that registers it."""
    before = parameter._backward_hooks or {}
    after = parameter._post_accumulate_grad_hooks or {}
    hooks: list[tuple[str, Any]] = [("register_hook", hook) for hook in before.values()]
    hooks += [("register_post_accumulate_grad_hook", hook) for hook in after.values()]
    return hooks
