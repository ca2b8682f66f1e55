"""Values of JSON, which any program reads."""

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["as_json"]


def as_json(value: Any) -> Any:
    """Return a value in which numbers that JSON lacks are texts, such as "nan".

    Args:
        value: Mappings, lists, tuples, texts, numbers, None, and any of these in each other.

    Example:
        >>> as_json({"loss": (0.5, float("nan"))})
        {'loss': [0.5, 'nan']}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): as_json(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(part) for part in value]
    return value
