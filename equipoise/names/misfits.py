"""Arguments that a function does not take: a message with the nearest names, in place of Python's own."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any

from equipoise.errors import ConfigurationTypeError
from equipoise.names.synonyms import keys_named, meant_commands, meant_keys

__all__ = ["attribute_meant", "described", "hint_of_argument", "refuse_misfits"]

# Names of arguments that a message lists.
_MOST_NAMES = 15
_KINDS_OF_DEVICES = ("cpu", "cuda", "gpu", "mps")
# What is not given to the trainer, by its name or by its key in a configuration.
_PLACES = {
    "data.batch_size": "`DataLoader(batch_size=...)`",
    "data.num_workers": "`DataLoader(num_workers=...)`",
    "module.lr": "`configure_optimizers` of the module",
    "optimizer": "`configure_optimizers` of the module",
}
# Arguments of the trainer's entry points, by the same.
_OF_ENTRY_POINTS = {
    "module": "model",
    "data": "datamodule",
    "train_dataloader": "train_dataloaders",
    "train_dataloaders": "train_dataloaders",
    "val_dataloaders": "val_dataloaders",
}


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
        text = described(by_position[-1])
        if not parameters:
            raise ConfigurationTypeError(f"{owner} takes no arguments, but was given {text}.") from None
        if "fast_dev_run" in parameters and hasattr(by_position[-1], "named_modules"):
            raise ConfigurationTypeError(
                f"{owner} takes no module: it is the first argument of `fit`, as in Trainer(...).fit(module, data)."
            ) from None
        if "devices" not in parameters and _are_devices(by_position[-1]):
            raise ConfigurationTypeError(
                f"{owner} takes no devices: give them to the trainer, as in Trainer(devices={text}, strategy=...)."
            ) from None
        raise ConfigurationTypeError(
            f"{owner} does not take {text} without a name: write NAME={text}; there are: {_listed(parameters)}"
        ) from None
    raise ConfigurationTypeError(f"{owner}: {reason}") from None


@cache
def attribute_meant(kind: type, name: str) -> str:
    """Return the end of a sentence about an attribute that a class lacks: what was meant; may be empty.

    It is kept, since programs ask again and again whether a name is there.

    Args:
        kind: The class.
        name: The name that it was asked for.
    """
    present = [word for word in dir(kind) if not word.startswith("_")]
    meant = [*meant_commands(name, present), *(key.removeprefix("trainer.") for key in _meant(name))]
    names = [*(word for word in meant if word in present), *get_close_matches(name, present, n=1)]
    nearest = [*_callbacks_among(meant), *map(repr, names)]
    return f"; did you mean {nearest[0]}?" if nearest else ""


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
        >>> hint_of_argument("auto_lr_find", ["callbacks"])
        'did you mean the callback LearningRateFinder of lightning.pytorch.callbacks?'
    """
    meant = _meant(name)
    if "ckpt_path" in meant and "ckpt_path" not in parameters:
        return "did you mean `fit(ckpt_path=...)`?"
    callbacks = _callbacks_among(meant)
    if callbacks:
        return f"did you mean {callbacks[0]}?"
    # A key of the configuration may have a value, as in precision=16-mixed.
    matches = [key for key in (key.removeprefix("trainer.") for key in meant) if key.partition("=")[0] in parameters]
    of_trainer = [key.removeprefix("trainer.") for key in meant or keys_named(name) if key.startswith("trainer.")]
    if of_trainer and not matches:
        return f"did you mean `Trainer({of_trainer[0]}=...)`?"
    # The Trainer, or one of its entry points.
    if not matches and {"fast_dev_run", "datamodule"}.intersection(parameters):
        keys = [name, *(meant or keys_named(name))]
        matches = [_OF_ENTRY_POINTS[key] for key in keys if _OF_ENTRY_POINTS.get(key) in parameters]
        places = [_PLACES[key] for key in keys if key in _PLACES]
        places += [f"`fit({_OF_ENTRY_POINTS[key]}=...)`" for key in keys if key in _OF_ENTRY_POINTS]
        if places and not matches:
            return f"did you mean {places[0]}?"
    matches += get_close_matches(name, parameters, n=1)
    if matches:
        return f"did you mean {matches[0]!r}?"
    return f"there are: {_listed(parameters)}"


def _meant(name: str) -> list[str]:
    """Return what a name may stand for: keys of a configuration, of which one has another name in a program."""
    keys = meant_keys(name)
    if "output_dir" in (name, *keys):
        return ["trainer.default_root_dir"]
    return keys


def _callbacks_among(keys: Sequence[str]) -> list[str]:
    """Return the callbacks of keys that choose one, such as callbacks=[learning_rate_finder]."""
    names = [key.removeprefix("callbacks=[").rstrip("]") for key in keys if key.startswith("callbacks=[")]
    return [f"the callback {name.title().replace('_', '')} of lightning.pytorch.callbacks" for name in names]


def _are_devices(value: Any) -> bool:
    items = value if isinstance(value, list | tuple) else [value]
    return bool(items) and all(str(item).partition(":")[0] in _KINDS_OF_DEVICES for item in items)


def described(value: Any) -> str:
    """Return the text of a value that a message refuses: one line; of a large object its class alone.

    Example:
        >>> described(dict)
        'the class dict: pass an object, dict(...)'
    """
    if isinstance(value, type):
        return f"the class {value.__name__}: pass an object, {value.__name__}(...)"
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"an object of {type(value).__name__}"


def _listed(names: Collection[str]) -> str:
    listed = ", ".join(list(names)[:_MOST_NAMES]) or "none"
    return f"{listed} ..." if len(names) > _MOST_NAMES else f"{listed}."
