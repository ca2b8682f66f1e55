"""Operations of tensors that change values in place, draw random numbers, or return views."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

__all__ = ["IN_PLACE", "RANDOM", "VIEWS", "override"]

# Methods that end with an underscore and change no values, or the memory in which they lie.
_OTHERS = ("requires_grad_", "detach_", "share_memory_", "rename_", "resize_", "resize_as_", "set_")
# Operators in place, as in `weight *= 0.9` and `weight[0] = 0`.
_OPERATORS = (
    "__iadd__",
    "__isub__",
    "__imul__",
    "__itruediv__",
    "__ifloordiv__",
    "__imod__",
    "__ipow__",
    "__setitem__",
)

IN_PLACE = (
    *(name for name in dir(Tensor) if name.endswith("_") and not name.startswith("_") and name not in _OTHERS),
    *_OPERATORS,
)
"""Names of the methods of a tensor that change its values."""

RANDOM = frozenset(
    (
        *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"),
        *("bernoulli", "dropout", "multinomial", "normal", "poisson", "rand_like", "randint_like", "randn_like"),
    )
)
"""Names of functions that draw random numbers."""

VIEWS = frozenset(
    (
        *("__getitem__", "chunk", "diagonal", "expand", "flatten", "narrow", "permute", "reshape", "select", "split"),
        *("squeeze", "t", "transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as"),
    )
)
"""Names of functions that return views."""


def override(names: Iterable[str], make: Callable[[str, Any], Any]) -> Callable[[type], type]:
    """Return a decorator of a class of tensors that replaces inherited methods.

    Args:
        names: The names of the methods.
        make: Returns the new method for a name and the inherited method.
    """

    def decorate(kind: type) -> type:
        for name in names:
            setattr(kind, name, make(name, getattr(kind, name)))
        return kind

    return decorate
