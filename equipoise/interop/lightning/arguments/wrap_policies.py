"""Policies that choose submodules for torch's FSDP, as far as they are lists of classes."""

import functools
from collections.abc import Mapping
from typing import Any

from torch import nn

__all__ = ["classes_of_checkpointing", "classes_of_policy"]

# Torch's ModuleWrapPolicy keeps its classes under this name, and offers no other.
_CLASSES = "_module_classes"


def classes_of_policy(policy: Any) -> list[type[nn.Module]] | None:
    """Return the classes of submodules that a policy chooses; None if it decides in another way.

    Args:
        policy: A set of classes, torch's ModuleWrapPolicy, or a partial of torch's transformer_auto_wrap_policy.
    """
    if isinstance(policy, functools.partial):
        policy = policy.keywords.get("transformer_layer_cls")
    classes = getattr(policy, _CLASSES, policy)
    if not isinstance(classes, set | frozenset | list | tuple) or not classes:
        return None
    return sorted(classes, key=lambda kind: kind.__qualname__)


def classes_of_checkpointing(arguments: Mapping[str, Any]) -> list[type[nn.Module]] | None:
    """Return the classes whose activations are computed again; None if a function decides.

    Args:
        arguments: What Lightning hands to torch's `apply_activation_checkpointing`.
    """
    if "auto_wrap_policy" in arguments:
        return classes_of_policy(arguments["auto_wrap_policy"])
    # The deprecated list of classes is in the closure of a function.
    for cell in getattr(arguments.get("check_fn"), "__closure__", None) or ():
        if isinstance(cell.cell_contents, tuple):
            return classes_of_policy(cell.cell_contents)
    return None
