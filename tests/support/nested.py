"""Classes of nested batches: a named tuple and data classes, as users write them."""

from collections import namedtuple
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

__all__ = ["Checked", "Frozen", "Pair", "Sample"]

Pair = namedtuple("Pair", ["first", "second"])


class Checked(namedtuple("Checked", ["values", "signs"])):
    """A named tuple whose constructor takes tensors alone, as that of a packed sequence does."""

    def __new__(cls, values: Tensor, signs: Tensor | None = None) -> "Checked":
        if signs is None:
            signs = values.sign()
        return super().__new__(cls, values.clone(), signs.clone())


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
