"""Find what in a checkpoint cannot be pickled, for a message that names it."""

import pickle
from collections.abc import Iterable
from typing import Any

from torch import Tensor

__all__ = ["describe_unpicklable"]


def describe_unpicklable(value: Any, key_path: str = "") -> str | None:
    """Return the keys and the class of the first object in nested containers that cannot be pickled; None if all can.

    Args:
        value: The content of a checkpoint, or a part of it.
        key_path: The keys that lead to the part. Default: empty.
    """
    if isinstance(value, Tensor) or _can_be_pickled(value):
        return None
    children: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        children = value.items()
    elif isinstance(value, list | tuple):
        children = enumerate(value)
    for key, child in children:
        child_path = f"{key_path}[{key!r}]" if key_path else repr(key)
        description = describe_unpicklable(child, child_path)
        if description is not None:
            return description
    return f"{key_path or 'the checkpoint'}, a {type(value).__name__},"


class _Discard:
    """A file that keeps nothing."""

    def write(self, data: Any) -> int:
        return len(data)


def _can_be_pickled(value: Any) -> bool:
    # The protocol of torch.save.
    pickler = pickle.Pickler(_Discard(), protocol=2)
    try:
        pickler.dump(value)
    except Exception:
        # Methods of the user may raise any error.
        return False
    return True
