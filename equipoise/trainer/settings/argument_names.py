"""Arguments of the Trainer: refuse unknown ones, suggest the nearest name in its signature, and keep those given.

Environment variables `PL_TRAINER_...` give arguments that the program does not, as in Lightning.
"""

import ast
import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Collection
from typing import Any, ParamSpec, TypeVar

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from equipoise.errors import ConfigurationTypeError
from equipoise.notices import rank_zero_warn
from equipoise.strategies.strategy import Strategy

__all__ = ["reads_arguments"]

P = ParamSpec("P")
R = TypeVar("R")

# Arguments of newer versions of Lightning's Trainer that change nothing which a run computes or writes.
_WITHOUT_EFFECT = ("suggest_integrations",)
_VARIABLES = "PL_TRAINER_"


def reads_arguments(constructor: Callable[P, R]) -> Callable[P, R]:
    """Decorate the Trainer's constructor so that an unknown keyword is refused with the nearest known one.

    Python's own message names the unknown keyword alone. The error is a TypeError, as Python's is, and a
    ConfigurationError. An argument that only Lightning's Trainer has is accepted, with a warning, if it changes nothing
    here. Strategies and plugins of Lightning are replaced by what they mean here. The object keeps the arguments that
    were given as `constructor_arguments`: another object like it can be built from them.

    An argument that is not given is read from an environment variable such as PL_TRAINER_MAX_STEPS, if there is one.

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
        owner = arguments[0]
        has_strategy = not isinstance(options.get("strategy", "auto"), str | Strategy)
        has_precision = not isinstance(options.get("precision"), str | int | None)
        if options.get("plugins") or has_strategy or has_precision:
            # Most programs have no such objects.
            from equipoise.trainer.settings.from_lightning.objects import translate_objects

            translate_objects(options)
        unknown = [name for name in options if name not in parameters]
        for name in unknown:
            _refuse_unless_ignored(type(owner).__name__, name, options[name], parameters)
            del options[name]
        for name in parameters:
            if name not in options and os.environ.get(_VARIABLES + name.upper()):
                options[name] = _from_environment(name)
        vars(owner)["constructor_arguments"] = options
        return constructor(*arguments, **options)

    return checked


def _from_environment(name: str) -> Any:
    variable = _VARIABLES + name.upper()
    value: Any = os.environ[variable]
    with contextlib.suppress(ValueError, SyntaxError):
        value = ast.literal_eval(value)
    rank_zero_info(f"{name}={value!r} is taken from the environment variable {variable}.")
    return value


def _refuse_unless_ignored(owner: str, name: str, value: Any, parameters: Collection[str]) -> None:
    """Refuse an unknown argument; warn instead if it is one of Lightning that has no effect here."""
    # 1. An argument of Lightning.
    defaults = _defaults_of_lightning()
    if name in _WITHOUT_EFFECT or (name in defaults and defaults[name] == value):
        rank_zero_warn(f"{owner} ignores Lightning's argument {name!r}, which has no effect here.")
        return
    if name in defaults:
        raise ConfigurationTypeError(
            f"{owner} does not have Lightning's argument {name!r}, and {name}={value!r} may change what a run does."
            " Leave it out."
        )

    # 2. The nearest parameter, or all of them if none is near.
    from equipoise.names.misfits import hint_of_argument

    raise ConfigurationTypeError(f"{owner} takes no argument {name!r}; {hint_of_argument(name, parameters)}")


def _defaults_of_lightning() -> dict[str, Any]:
    import lightning.pytorch

    signature = inspect.signature(lightning.pytorch.Trainer.__init__)
    return {name: parameter.default for name, parameter in signature.parameters.items()}
