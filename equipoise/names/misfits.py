"""Arguments that a function does not take: a message with the nearest names, in place of Python's own."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from equipoise.errors import ConfigurationTypeError
from equipoise.names.synonyms import keys_named, meant_keys

__all__ = ["hint_of_argument", "refuse_misfits"]

# Names of arguments that a message lists.
_MOST_NAMES = 15


def refuse_misfits(function: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Refuse arguments that a function does not take.

    Args:
        function: The function, or the `__init__` of a class.
        arguments: The arguments by position, for an `__init__` with the object.
        options: The arguments by name.

    Raises:
        ConfigurationTypeError: If they do not fit its signature.

    Example:
        >>> def count(*, least): ...
        >>> refuse_misfits(count, [], {"leas": 1})
        Traceback (most recent call last):
        equipoise.errors.ConfigurationTypeError: count takes no argument 'leas'; did you mean 'least'?
    """
    signature = inspect.signature(function)
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        reason = f"{error}."
    else:
        return
    owner = function.__qualname__
    by_position = list(arguments)
    if function.__name__ == "__init__":
        owner = type(arguments[0]).__name__
        del by_position[0]
    parameters = [name for name in signature.parameters if name != "self"]
    unknown = [name for name in options if name not in parameters]
    if unknown and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
        raise ConfigurationTypeError(
            f"{owner} takes no argument {unknown[0]!r}; {hint_of_argument(unknown[0], parameters)}"
        ) from None
    if by_position and reason.startswith("too many positional"):
        text = f"{by_position[-1]!r:.60}"
        raise ConfigurationTypeError(
            f"{owner} does not take {text} without a name: write NAME={text}; there are: {_listed(parameters)}."
        ) from None
    raise ConfigurationTypeError(f"{owner}: {reason}") from None


def hint_of_argument(name: str, parameters: Collection[str]) -> str:
    """Return the end of a sentence about an unknown argument: what was meant, or the names that there are.

    Args:
        name: The unknown argument.
        parameters: The names that the function takes.

    Example:
        >>> hint_of_argument("gpus", ["devices", "strategy"])
        "did you mean 'devices'?"
        >>> hint_of_argument("epochs", ["model", "ckpt_path"])
        'did you mean `Trainer(max_epochs=...)`?'
    """
    meant = meant_keys(name)
    if "ckpt_path" in meant and "ckpt_path" not in parameters:
        return "did you mean `fit(ckpt_path=...)`?"
    # A key of the configuration may have a value, as in precision=16-mixed.
    matches = [key for key in (key.removeprefix("trainer.") for key in meant) if key.partition("=")[0] in parameters]
    of_trainer = [key.removeprefix("trainer.") for key in meant or keys_named(name) if key.startswith("trainer.")]
    if of_trainer and not matches:
        return f"did you mean `Trainer({of_trainer[0]}=...)`?"
    matches += get_close_matches(name, parameters, n=1)
    if matches:
        return f"did you mean {matches[0]!r}?"
    return f"there are: {_listed(parameters)}."


def _listed(names: Collection[str]) -> str:
    listed = ", ".join(list(names)[:_MOST_NAMES])
    return f"{listed} ..." if len(names) > _MOST_NAMES else listed
