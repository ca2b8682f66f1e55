"""Check a configuration as a whole: mistyped keys and groups, missing classes, wrong arguments."""

import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType
from typing import Any

from equipoise.app.config.annotations import check_types
from equipoise.errors import ConfigurationError

__all__ = [
    "GROUPS",
    "KEYS",
    "STAGES",
    "check_keys",
    "check_objective",
    "check_targets",
    "constructor_default",
    "did_you_mean",
    "locate",
]

STAGES = ("fit", "validate", "test", "predict")
GROUPS = ("trainer", "strategy", "precision", "callbacks", "logger", "module", "data", "experiment")
KEYS = (*GROUPS, "stage", "seed", "ckpt_path", "test", "objective", "output_dir", "hydra")
_OPTIONAL = ("precision", "module", "data", "experiment", "objective", "hydra")
_PACKAGES = {"sklearn": "scikit-learn", "cv2": "opencv-python", "PIL": "pillow", "yaml": "pyyaml"}  # by import name


def did_you_mean(name: str, options: Iterable[str], prefix: str = "") -> str:
    """Ends a sentence that has named something unknown: with the nearest known name, or with all where none is near.

    Args:
        name: What was given.
        options: What there is.
        prefix: What to put before a name, such as `"trainer."`. Default: nothing.

    Example:
        >>> did_you_mean("max_epoch", ["max_epochs", "max_steps"], "trainer.")
        "; did you mean 'trainer.max_epochs'?"
        >>> did_you_mean("x", ["max_epochs", "max_steps"])
        '; there are: max_epochs, max_steps.'
        >>> did_you_mean("x", [])
        '.'
    """
    known = sorted({option for option in options if not option.startswith("_")})
    near = get_close_matches(name, known, n=1)
    if near:
        return f"; did you mean {prefix + near[0]!r}?"
    return f"; there are: {', '.join(known)}." if known else "."


def check_keys(values: Mapping[str, Any]) -> None:
    """Checks the outermost keys of a configuration.

    Keys of the user's own are welcome, unless they look like a misspelt one of ours.

    Args:
        values: The whole configuration.

    Raises:
        ConfigurationError: If a key is misspelt, there is no module, or a value is of a wrong type.
    """
    for key in values:
        near = get_close_matches(key, KEYS, n=1, cutoff=0.8)
        if near and key not in KEYS:
            raise ConfigurationError(f"There is no key {key!r} in the configuration; did you mean {near[0]!r}?")
    lacking = [key for key in KEYS if key not in _OPTIONAL and key not in values]
    if lacking:
        raise ConfigurationError(
            f"The configuration has no {', '.join(lacking)}: put equipoise first in its defaults list."
        )
    if values["stage"] not in STAGES:
        raise ConfigurationError(f"stage must be one of {', '.join(STAGES)}; it is {values['stage']!r}.")
    if not values.get("module"):
        raise ConfigurationError(
            "There is no module: choose one with module=NAME, or name its class with +module._target_=PACKAGE.CLASS."
        )
    if not (values["seed"] is None or type(values["seed"]) is int):
        raise ConfigurationError(f"seed must be a whole number or null; it is {values['seed']!r}.")
    if type(values["test"]) is not bool:
        raise ConfigurationError(f"test must be true or false; it is {values['test']!r}.")
    check_objective(values.get("objective"))


def check_objective(objective: Any) -> None:
    """Check the type of the key `objective`.

    Args:
        objective: Its value: a name, a list of names, or None.

    Raises:
        ConfigurationError: If it is something else.
    """
    names = objective if isinstance(objective, list) else [objective]
    if objective is not None and not (names and all(isinstance(name, str) for name in names)):
        raise ConfigurationError(
            f"objective must be the name of a logged value, a list of names, or null; it is {objective!r}."
        )


def locate(path: str, key: str) -> Callable[..., Any]:
    """Imports what a `_target_` names.

    Args:
        path: The dotted path of a class or a function.
        key: Where in the configuration it stands, for the message.

    Raises:
        ConfigurationError: If it cannot be imported or called.

    Example:
        >>> locate("collections.OrderedDict", "module")
        <class 'collections.OrderedDict'>
    """
    wrong = f"{key}._target_={path!r} cannot be imported: "
    parts = path.split(".")
    found: Any = None
    for index, part in enumerate(parts):
        name = ".".join(parts[: index + 1])
        if found is None or (isinstance(found, ModuleType) and not hasattr(found, part)):
            found = _import(name, found, wrong)
        elif not hasattr(found, part):
            raise ConfigurationError(
                f"{wrong}{'.'.join(parts[:index])} has no {part!r}{did_you_mean(part, dir(found))}"
            )
        else:
            found = getattr(found, part)
    if not callable(found):
        raise ConfigurationError(f"{key}._target_={path!r} must be a class or a function; it is {found!r}.")
    return found  # type: ignore[no-any-return]


def constructor_default(path: str, parameter: str) -> Any:
    """Return the default that a class or function has for a parameter.

    Args:
        path: The dotted path of the class or function.
        parameter: The name of the parameter.

    Returns:
        The default; None if there is no such parameter or no default.

    Raises:
        ConfigurationError: If the path cannot be imported.

    Example:
        >>> constructor_default("lightning.pytorch.callbacks.ModelCheckpoint", "mode")
        'min'
    """
    try:
        found = inspect.signature(locate(path, "callbacks")).parameters.get(parameter)
    except ValueError:  # a builtin without a signature
        return None
    return None if found is None or found.default is found.empty else found.default


def _import(name: str, package: ModuleType | None, wrong: str) -> ModuleType:
    """Imports a module, or says why that is not possible."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:  # the module is there, and imports something that is not
            missing = (error.name or "").partition(".")[0]
            is_other = bool(missing) and missing != name.partition(".")[0]
            way_out = f" Install it: pip install {_PACKAGES.get(missing, missing)}." if is_other else ""
            raise ConfigurationError(f"{wrong}{name} failed with: {error}.{way_out}") from error
    except ImportError as error:
        raise ConfigurationError(f"{wrong}{name} failed with: {error}.") from error
    last = name.rpartition(".")[2]
    if package is None:
        raise ConfigurationError(
            f"{wrong}there is no module {name!r}, neither installed nor beside the folder of configurations."
        )
    modules = [module.name for module in pkgutil.iter_modules(getattr(package, "__path__", []))]
    raise ConfigurationError(
        f"{wrong}{package.__name__} has no {last!r}{did_you_mean(last, [*modules, *_own(package)])}"
    )


def _own(module: ModuleType) -> list[str]:
    """The names a module defines itself."""
    return [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]


def check_targets(values: Any, key: str, more: Mapping[str, Any] | None = None) -> None:
    """Checks that every `_target_` in a part of a configuration is there, and takes the arguments beside it.

    Args:
        values: The part: a mapping with a `_target_`, or anything that may hold such mappings.
        key: Where in the configuration it stands, for the message.
        more: Further arguments of the outermost target. Default: none.

    Raises:
        ConfigurationError: If a target cannot be imported, takes no such argument, needs one that is not there,
            or is given a value that contradicts its annotation.

    Example:
        >>> check_targets({"_target_": "fractions.Fraction", "numerator": 1}, "module")
    """
    if isinstance(values, list):
        for index, value in enumerate(values):
            check_targets(value, f"{key}.{index}")
    if isinstance(values, dict):
        for name, value in values.items():
            check_targets(value, f"{key}.{name}")
        if "_target_" in values:
            target = locate(values["_target_"], key)
            _check_arguments(target, {**values, **(more or {})}, key)
            check_types(target, values, key)


def _check_arguments(target: Callable[..., Any], arguments: Mapping[str, Any], key: str) -> None:
    try:
        parameters = inspect.signature(target).parameters.values()
    except ValueError:  # a builtin without a signature
        return
    name = getattr(target, "__name__", str(target))
    takes = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for argument in arguments:
        if not (argument.startswith("_") or argument in takes or any(p.kind is p.VAR_KEYWORD for p in parameters)):
            raise ConfigurationError(
                f"{key}.{argument} is not an argument of {name}{did_you_mean(argument, takes, key + '.')}"
            )
    missing = [p.name for p in parameters if p.name in takes and p.default is p.empty and p.name not in arguments]
    if missing and not arguments.get("_args_") and not arguments.get("_partial_"):
        raise ConfigurationError(
            f"{name} needs {', '.join(missing)}: give it in the configuration, such as {key}.{missing[0]}=VALUE."
        )
