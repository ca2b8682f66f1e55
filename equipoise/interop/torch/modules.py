"""Private names of the modules and parameters of torch.

Each name stands here with the reason why nothing public does; a test notices when one of them changes.
"""

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "STRUCTURE",
    "buffers_of",
    "children_of",
    "has_hooks",
    "has_module_hooks",
    "hooks_of",
    "is_compiled",
    "parameters_of",
    "set_device_of",
    "shell_of",
    "versions",
]

# The entries of a module's `__dict__` that hold what is registered in it. A shallow copy needs dictionaries of its own,
# and `register_module` and its siblings check what need not be checked here.
STRUCTURE = ("_parameters", "_buffers", "_modules")
_VERSION = attrgetter("_version")


def shell_of(module: nn.Module) -> nn.Module:
    """A copy of a module without anything registered in it; attributes are shared."""
    shell: nn.Module = object.__new__(type(module))
    vars(shell).update(vars(module))
    for name in STRUCTURE:
        vars(shell)[name] = {}
    return shell


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The dictionary of a module's own parameters, which may be written to."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The dictionary of a module's own buffers, which may be written to."""
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The dictionary of a module's children, which may be written to."""
    return module._modules


def versions(tensors: Iterable[Tensor]) -> list[int] | None:
    """A number for each tensor that changes when it is changed in place; None where one keeps no count of changes."""
    try:
        return list(map(_VERSION, tensors))
    except RuntimeError:  # a tensor made in inference mode
        return None


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` or `module.compile()` was applied; only what they leave in the module tells."""
    state = vars(module)
    return "dynamo_ctx" in state or any(state.get(key) for key in ("_compiled_call_impl", "_compiler_ctx"))


def has_hooks(parameter: Tensor) -> bool:
    """Whether somebody registered a hook on a parameter's gradient."""
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def set_device_of(module: nn.Module, device: torch.device) -> None:
    """Makes `module.device` say where its batches are, though its parts lie on several devices."""
    state: dict[str, Any] = vars(module)
    if "_device" in state:  # Lightning's modules know it by what `to` was last called with
        state["_device"] = device


def has_module_hooks(module: nn.Module) -> bool:
    """Whether somebody registered a hook on a module's forward or backward."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def hooks_of(parameter: Tensor) -> list[tuple[str, Any]]:
    """The hooks on a parameter's gradient, each with the method that registers it."""
    before = parameter._backward_hooks or {}
    after = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return [("register_hook", hook) for hook in before.values()] + [
        ("register_post_accumulate_grad_hook", hook) for hook in after.values()
    ]
