"""Attributes that a module's forward reads: numbers, texts and truth values by which it may decide."""

from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from torch import nn

__all__ = ["attributes_read"]

_PLAIN = (bool, int, float, complex, str, type(None))


def attributes_read(module: nn.Module) -> dict[str, Any]:
    """Return the plain attributes of a module that its forward names, or a method that the forward calls.

    Args:
        module: The module.

    Returns:
        Names and values.

    Example:
        >>> attributes_read(nn.Dropout(0.25))
        {'p': 0.25, 'inplace': False}
    """
    kind: Any = type(module)
    names = _names_read_by(kind)
    attributes = {}
    for name, value in vars(module).items():
        # The key of a call contains the training modes.
        is_read = name in names and name != "training"
        # NaN does not equal itself.
        if is_read and isinstance(value, _PLAIN) and value == value:
            attributes[name] = value
    return attributes


@cache
def _names_read_by(kind: type[nn.Module]) -> frozenset[str]:
    """Return the names in the forward of a class, and in those of its methods that the forward names."""
    names: set[str] = set()
    waiting = ["forward", "__call__"]
    while waiting:
        method_name = waiting.pop()
        for code in _codes(kind, method_name):
            new_names = set(_names_in(code)) - names
            names |= new_names
            waiting.extend(new_names)
    return frozenset(names)


def _codes(kind: type[nn.Module], name: str) -> Iterator[CodeType]:
    """Yield the code of a method or property in a class and in its base classes, which it may call by `super()`."""
    for parent in kind.__mro__:
        attribute: Any = vars(parent).get(name)
        if isinstance(attribute, property):
            attribute = attribute.fget
        # Decorators keep the function that they wrap.
        while hasattr(attribute, "__wrapped__"):
            attribute = attribute.__wrapped__
        # What the base of all modules reads decides nothing.
        if isinstance(attribute, FunctionType) and parent is not nn.Module:
            yield attribute.__code__


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names of attributes and globals in a function, and in the functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            # The name in `getattr(self, "name")`.
            yield constant
