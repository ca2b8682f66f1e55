"""Arguments of the Trainer: refuse unknown ones, suggest the nearest name in its signature, and keep those given."""

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

    The object keeps the arguments that were given as `constructor_arguments`: another object like it can be built from
    them.

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
    # Read the signature once, not in each call.
    parameters = list(inspect.signature(constructor).parameters)
    parameters.remove("self")

    @functools.wraps(constructor)
    def checked(*arguments: P.args, **options: P.kwargs) -> R:
        for name in options:
            if name in parameters:
                continue
            name_of_owner = type(arguments[0]).__name__
            # The nearest parameter, or all of them if none is near.
            hint = f"there are: {', '.join(parameters)}."
            matches = get_close_matches(name, parameters, n=1)
            if matches:
                hint = f"did you mean {matches[0]!r}?"
            raise ConfigurationTypeError(f"{name_of_owner} takes no argument {name!r}; {hint}")
        owner = arguments[0]
        vars(owner)["constructor_arguments"] = options
        return constructor(*arguments, **options)

    return checked
