"""Placeholders: tensors without memory, which stand in a checkpoint for tensors whose values lie in shards.

A placeholder has the shape and dtype of its tensor, so checks of a checkpoint see no difference. It is on the meta
device and carries the name under which the shards are found.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["make_placeholder", "name_of", "replace_placeholders"]

# The attribute of a placeholder with its name.
_NAME = "equipoise_shards"


def make_placeholder(tensor: Tensor, name: str) -> Tensor:
    """Return a placeholder for a tensor.

    Args:
        tensor: The tensor, of any device; of one in shards, the shape of the whole counts.
        name: The name under which its shards are saved.

    Example:
        >>> placeholder = make_placeholder(torch.ones(3), "weight")
        >>> placeholder.shape, placeholder.is_meta, name_of(placeholder)
        (torch.Size([3]), True, 'weight')
    """
    placeholder = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    vars(placeholder)[_NAME] = name
    return placeholder


def name_of(value: Any) -> str | None:
    """Return the name of a placeholder; None for any other value."""
    if not isinstance(value, Tensor) or not value.is_meta:
        return None
    name = vars(value).get(_NAME)
    # Anyone may have written the attribute of a tensor in a file.
    if isinstance(name, str):
        return name
    return None


def replace_placeholders(value: Any, replace: Callable[[Tensor, str], Any]) -> Any:
    """Replace all placeholders in nested dictionaries, lists and tuples.

    Args:
        value: The outermost container. Dictionaries and lists are changed in place.
        replace: Called with a placeholder and its name; returns what takes its place.

    Returns:
        The container, or what takes the place of a placeholder.
    """
    name = name_of(value)
    if name is not None:
        return replace(value, name)
    if isinstance(value, dict):
        for key in list(value):
            value[key] = replace_placeholders(value[key], replace)
    elif type(value) is list:
        for index, item in enumerate(value):
            value[index] = replace_placeholders(item, replace)
    elif type(value) is tuple:
        return tuple(replace_placeholders(item, replace) for item in value)
    return value
