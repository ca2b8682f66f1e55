"""Refuse unknown arguments, with the nearest known name."""

import functools
import inspect
from collections.abc import Callable
from difflib import get_close_matches
from typing import ParamSpec, TypeVar

from equipoise.errors import ConfigurationTypeError

__all__ = ["suggests_arguments"]

P = ParamSpec("P")
R = TypeVar("R")


def suggests_arguments(constructor: Callable[P, R]) -> Callable[P, R]:
    """Decorate a constructor so that an unknown keyword is refused with the nearest known one.

    Python's own message names the unknown keyword alone. The error is a TypeError, as Python's is, and a
    ConfigurationError.

    Args:
        constructor: An `__init__` whose parameters all have names.

    Example:
        >>> from equipoise import Trainer
        >>> Trainer(max_epoch=3)
        Traceback (most recent call last):
        equipoise.errors.ConfigurationTypeError: Trainer takes no argument 'max_epoch'; did you mean 'max_epochs'?
    """
    known = [name for name in inspect.signature(constructor).parameters if name != "self"]

    @functools.wraps(constructor)
    def checked(*arguments: P.args, **options: P.kwargs) -> R:
        unknown = [name for name in options if name not in known]
        if unknown:
            owner = type(arguments[0]).__name__
            near = get_close_matches(unknown[0], known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}."
            raise ConfigurationTypeError(f"{owner} takes no argument {unknown[0]!r}; {hint}")
        return constructor(*arguments, **options)

    return checked
