"""Placeholders: tensors without memory, which stand in a checkpoint for tensors whose values lie in shards.

A placeholder has the shape and dtype of its tensor, so checks of a checkpoint see no difference. It is on the meta
device and carries the name under which the shards are found.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from equipoise.errors import CheckpointError
from equipoise.interop.torch.modules import versions

__all__ = ["make_placeholder", "name_of", "place_without_values", "replace_placeholders"]

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


def place_without_values(content: dict[str, Any]) -> str | None:
    """Return the place of a tensor in nested containers that was computed from a placeholder; None if there is none.

    Such a tensor has neither values nor shards. A placeholder that was changed in place counts, too.

    Args:
        content: The outermost dictionary.

    Example:
        >>> placeholder = make_placeholder(torch.ones(3), "weight")
        >>> place_without_values({"state_dict": {"weight": placeholder}})
        >>> place_without_values({"state_dict": {"weight": placeholder.half()}})
        "['state_dict']['weight']"
    """
    pending: list[tuple[str, Any]] = [("", content)]
    visited = set()
    while pending:
        place, value = pending.pop()
        if isinstance(value, Tensor):
            # A placeholder of inference mode has no version.
            was_changed = versions([value]) != [0] and not value.is_inference()
            if value.is_meta and (name_of(value) is None or was_changed):
                return place
        elif id(value) not in visited:
            visited.add(id(value))
            items: Iterable[tuple[Any, Any]]
            if isinstance(value, dict):
                items = value.items()
            else:
                items = enumerate(value)
            for key, item in items:
                if isinstance(item, Tensor | dict | list | tuple):
                    pending.append((f"{place}[{key!r}]", item))
    return None


def replace_placeholders(content: dict[str, Any], replace: Callable[[Tensor, str], Any]) -> None:
    """Replace all placeholders in nested dictionaries, lists and tuples.

    Args:
        content: The outermost dictionary. Dictionaries and lists in it are changed in place.
        replace: Called with a placeholder and its name; returns the value that takes its place.

    Raises:
        CheckpointError: If containers are nested too deeply.
    """
    # Containers and their replacements, by identity: a container may be in several places, or in itself.
    done: dict[int, tuple[Any, Any]] = {}

    def replaced(value: Any) -> Any:
        name = name_of(value)
        if name is not None:
            return replace(value, name)
        if id(value) in done:
            _, result = done[id(value)]
            return result
        if type(value) is tuple:
            result = tuple(map(replaced, value))
            done[id(value)] = (value, result)
            return result
        if not isinstance(value, dict | list):
            return value
        places: Iterable[Any] = range(len(value))
        if isinstance(value, dict):
            # Its keys at present.
            places = list(value)
        done[id(value)] = (value, value)
        for place in places:
            value[place] = replaced(value[place])
        return value

    try:
        replaced(content)
    except RecursionError as error:
        raise CheckpointError("The checkpoint is damaged: its entries are nested too deeply.") from error
