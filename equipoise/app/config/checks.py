"""Check a composed configuration: mistyped outermost keys, missing classes, wrong arguments."""

import contextlib
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from inspect import Parameter
from pathlib import Path
from types import ModuleType
from typing import Any

from equipoise.app.config.annotations import check_types, parameters_of
from equipoise.app.config.keys import KEYS, STAGES
from equipoise.app.config.suggestions import did_you_mean
from equipoise.errors import ConfigurationError
from equipoise.formats import format_path
from equipoise.names.synonyms import meant_keys

__all__ = [
    "check_keys",
    "check_objective",
    "check_targets",
    "constructor_default",
    "import_paths",
    "locate",
    "takes_argument",
]

_OPTIONAL = ("precision", "launcher", "module", "data", "experiment", "objective", "hydra")

# Packages that are imported under another name, by that name.
_PACKAGES = {"sklearn": "scikit-learn", "cv2": "opencv-python", "PIL": "pillow", "yaml": "pyyaml"}


def check_keys(values: Mapping[str, Any]) -> None:
    """Check the outermost keys of a configuration.

    The user may add keys, unless they look like misspelt ones of Equipoise.

    Raises:
        ConfigurationError: If a key is misspelt, there is no module, or a value is of a wrong type.
    """
    for key in values:
        _check_spelling(key)
    missing = [key for key in KEYS if key not in _OPTIONAL and key not in values]
    if missing:
        raise ConfigurationError(
            f"The configuration has no {', '.join(missing)}: put equipoise first in its defaults list."
        )
    stage = values["stage"]
    if stage not in STAGES:
        raise ConfigurationError(f"stage must be one of {', '.join(STAGES)}; it is {stage!r}.")
    if not values.get("module"):
        raise ConfigurationError(
            "There is no module: choose one with module=NAME, or name its class with +module._target_=PACKAGE.CLASS."
        )
    if isinstance(values.get("experiment"), Mapping):
        raise ConfigurationError(
            "The file of the experiment sets keys below 'experiment', where nothing reads them: it must begin with the"
            " line `# @package _global_`."
        )
    seed = values["seed"]
    # By type, because isinstance counts true and false among the integers.
    if seed is not None and (type(seed) is not int or not 0 <= seed < 2**32):
        raise ConfigurationError(f"seed must be a whole number from 0 to 4294967295, or null; it is {seed!r}.")
    test = values["test"]
    if type(test) is not bool:
        raise ConfigurationError(f"test must be true or false; it is {test!r}.")
    check_objective(values.get("objective"))


def _check_spelling(key: str) -> None:
    if key in KEYS:
        return
    matches = get_close_matches(key, KEYS, n=1, cutoff=0.8)
    if matches:
        raise ConfigurationError(f"There is no key {key!r} in the configuration; did you mean {matches[0]!r}?")


def check_objective(objective: Any) -> None:
    """Check the type of the key `objective`.

    Args:
        objective: Its value: a name, a list of names, or None.

    Raises:
        ConfigurationError: If it is something else.
    """
    if objective is None:
        return
    names = [objective]
    if isinstance(objective, list):
        names = objective
    are_names = all(isinstance(name, str) for name in names)
    if not names or not are_names:
        raise ConfigurationError(
            f"objective must be the name of a logged value, a list of names, or null; it is {objective!r}."
        )


@contextlib.contextmanager
def import_paths(folders: Sequence[Path]) -> Iterator[None]:
    """Put the parents of folders on Python's path, so that a `_target_` can be imported from there."""
    path = sys.path.copy()
    sys.path[:0] = [str(folder.parent) for folder in folders]
    try:
        yield
    finally:
        sys.path[:] = path


def locate(path: str, key: str) -> Callable[..., Any]:
    """Import the class or function that a `_target_` names.

    Args:
        path: The dotted path of a class or a function.
        key: The place of the `_target_` in the configuration, for the message.

    Raises:
        ConfigurationError: If it cannot be imported or called.

    Example:
        >>> locate("collections.OrderedDict", "module")
        <class 'collections.OrderedDict'>
    """
    message_start = f"{key}._target_={path!r} cannot be imported: "
    as_imported = re.sub(r"\.py\b", "", path).replace("/", ".").replace(":", ".")
    if as_imported != path:
        raise ConfigurationError(f"{message_start}write it as Python imports it, {as_imported}.")
    value: Any = None
    names: list[str] = []
    for name in path.split("."):
        parent_path = ".".join(names)
        names.append(name)
        if value is not None and hasattr(value, name):
            value = getattr(value, name)
        elif value is None or isinstance(value, ModuleType):
            value = _import(".".join(names), value, message_start)
        else:
            hint = did_you_mean(name, dir(value))
            raise ConfigurationError(f"{message_start}{parent_path} has no {name!r}{hint}")
    if not callable(value):
        raise ConfigurationError(f"{key}._target_={path!r} must be a class or a function; it is {value!r}.")
    return value  # type: ignore[no-any-return]


def takes_argument(path: str, name: str) -> bool:
    """Return True if a class or function has a parameter of this name; False if it cannot be imported.

    Example:
        >>> takes_argument("fractions.Fraction", "numerator")
        True
    """
    try:
        return name in parameters_of(locate(path, ""))
    except ConfigurationError:
        return False


def constructor_default(path: str, parameter: str) -> Any:
    """Return the default that a class or function has for a parameter.

    Returns:
        The default; None if there is no such parameter or no default.

    Raises:
        ConfigurationError: If the path cannot be imported.

    Example:
        >>> constructor_default("lightning.pytorch.callbacks.ModelCheckpoint", "mode")
        'min'
    """
    description = parameters_of(locate(path, "callbacks")).get(parameter)
    if description is None or description.default is description.empty:
        return None
    return description.default


def _import(name: str, package: ModuleType | None, message_start: str) -> ModuleType:
    """Import a module, or raise an error that gives the reason."""
    # 1. The module exists, unless it is itself the missing one.
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            way_out = _advice_to_install(error, name)
            raise ConfigurationError(f"{message_start}{name} failed with: {error}.{way_out}") from error
    except ImportError as error:
        raise ConfigurationError(f"{message_start}{name} failed with: {error}.") from error
    except SyntaxError as error:
        place = f"{format_path(str(error.filename))}, line {error.lineno}"
        raise ConfigurationError(f"{message_start}{place}: {error.msg}: {(error.text or '').strip()}") from error

    # 2. It is missing.
    last = name.rpartition(".")[2]
    defined = _definition(last, package)
    if defined:
        raise ConfigurationError(f"{message_start}did you mean {defined!r}?")
    if package is None:
        raise ConfigurationError(
            f"{message_start}there is no module {name!r}, neither installed nor beside the folder of configurations."
        )
    options = [module.name for module in pkgutil.iter_modules(getattr(package, "__path__", []))]
    options += _names_defined_in(package)
    hint = did_you_mean(last, options)
    raise ConfigurationError(f"{message_start}{package.__name__} has no {last!r}{hint}")


def _definition(name: str, package: ModuleType | None) -> str | None:
    """Return the path of the class or function of this name in a package, or beside the folder of configurations."""
    # `import_paths` puts that folder first.
    folder = Path(sys.path[0] if package is None else next(iter(getattr(package, "__path__", [])), ""))
    start = [] if package is None else package.__name__.split(".")
    is_definition = re.compile(rf"^(class|def) {re.escape(name)}\b", flags=re.MULTILINE)
    for file in sorted([*folder.glob("*.py"), *folder.glob("*/*.py")]):
        if is_definition.search(file.read_text(encoding="utf-8", errors="replace")):
            return ".".join([*start, *file.relative_to(folder).with_suffix("").parts, name])
    return None


def _advice_to_install(error: ModuleNotFoundError, name: str) -> str:
    """Return the advice for a module that imports a missing package; empty if its own package lacks a part."""
    missing = (error.name or "").partition(".")[0]
    package = name.partition(".")[0]
    if missing in ("", package):
        return ""
    return f" Install it: pip install {_PACKAGES.get(missing, missing)}."


def _names_defined_in(module: ModuleType) -> list[str]:
    """Return the names that a module defines, without those that it imports."""
    return [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]


def check_targets(values: Any, key: str, more: Mapping[str, Any] | None = None) -> None:
    """Check that every `_target_` in a part of a configuration exists, and takes the arguments beside it.

    Args:
        values: The part: a mapping with a `_target_`, or anything that may hold such mappings.
        key: The place of the part in the configuration, for the message.
        more: Further arguments of the outermost target. Default: none.

    Raises:
        ConfigurationError: If a target cannot be imported, takes no such argument, needs an argument that is missing,
            or if a value contradicts its annotation.

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
            arguments = dict(values)
            if more is not None:
                arguments.update(more)
            _check_arguments(target, arguments, key)
            check_types(target, values, key)


def _check_arguments(target: Callable[..., Any], arguments: Mapping[str, Any], key: str) -> None:
    """Check that a target takes these arguments, and needs no others."""
    # 1. Read the signature.
    parameters: dict[str, Parameter] = {}
    takes_any_name = False
    for parameter in parameters_of(target).values():
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            parameters[parameter.name] = parameter
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_any_name = True
    target_name = getattr(target, "__name__", str(target))

    # 2. Refuse unknown arguments; names with an underscore are Hydra's.
    for argument in arguments:
        is_hydras = argument.startswith("_")
        if is_hydras or takes_any_name or argument in parameters:
            continue
        meant = meant_keys(argument) if key == "trainer" else ()
        hint = did_you_mean(argument, parameters, f"{key}.", meant)
        raise ConfigurationError(f"{key}.{argument} is not an argument of {target_name}{hint}")

    # 3. Refuse missing arguments, unless they come by position or later.
    if arguments.get("_args_") or arguments.get("_partial_"):
        return
    missing = [
        name for name, parameter in parameters.items() if parameter.default is parameter.empty and name not in arguments
    ]
    if missing:
        raise ConfigurationError(
            f"{target_name} needs {', '.join(missing)}: give it in the configuration, such as {key}.{missing[0]}=VALUE."
        )
