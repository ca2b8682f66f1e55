"""Classes of nested batches: a named tuple and data classes, as users write them."""

from collections import namedtuple
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Frozen", "Pair", "Sample"]

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Sample:
    """A data class with a field that its constructor does not take."""

    inner: Any
    note: str = "x"
    derived: Any = field(default=None, init=False)


@dataclass(frozen=True)
class Frozen:
    """A data class whose fields cannot be set."""

    inner: Any
