"""Check values of a configuration against the annotations of the constructor that receives them.

Only values that a configuration can express are checked: numbers, texts, true and false, null, lists and mappings of
them, and unions, `Literal` and `Optional`. Every other annotation accepts every value, and so does one that cannot be
evaluated.
"""

import collections.abc
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from equipoise.errors import ConfigurationError

__all__ = ["accepts", "annotation_of", "check_types", "name_of_type", "parameters_of"]

_NUMBERS = (int, float)

# Origins of annotations that allow a list.
_LISTS = (
    list,
    tuple,
    collections.abc.Sequence,
    collections.abc.MutableSequence,
    collections.abc.Collection,
    collections.abc.Iterable,
)
# Origins of annotations that allow a mapping.
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)


def check_types(target: Callable[..., Any], values: Mapping[str, Any], key: str) -> None:
    """Check the arguments of a target that have an annotation.

    Args:
        target: The class or function to call.
        values: Its arguments by name. Names that the target does not take are ignored.
        key: The place in the configuration, for the message.

    Raises:
        ConfigurationError: If a value contradicts the annotation of its parameter.

    Example:
        >>> def net(width: int, dropout: float | None = None): ...
        >>> check_types(net, {"width": 64, "dropout": 0.5}, "module")
    """
    parameters = parameters_of(target)
    for name, value in values.items():
        parameter = parameters.get(name)
        if parameter is None:
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        annotation = annotation_of(parameter, target)
        if accepts(annotation, value):
            continue
        if _agrees_with_default(annotation, parameter):
            raise ConfigurationError(_contradiction(target, f"{key}.{name}", annotation, value))


def parameters_of(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a class or function by name. A builtin without a signature takes any arguments."""
    try:
        return inspect.signature(target).parameters
    except ValueError:
        # No key of a configuration is empty.
        return {"": inspect.Parameter("_", inspect.Parameter.VAR_KEYWORD)}


def _contradiction(target: Callable[..., Any], key: str, annotation: Any, value: Any) -> str:
    type_name = name_of_type(annotation)
    target_name = getattr(target, "__name__", target)
    text = repr(value)
    way_out = ""
    if value is None:
        text = "null"
        way_out = f" If null has a meaning, annotate it as {type_name} | None."
    elif isinstance(value, list):
        way_out = f" A sweep takes its values without brackets: --multirun {key}={','.join(map(str, value))}."
    return f"{key} must be of type {type_name}, as {target_name} annotates it; it is {text}.{way_out}"


def accepts(annotation: Any, value: Any) -> bool:
    """Return whether an annotation allows a value of a configuration.

    Example:
        >>> accepts(float, 1), accepts(float, "abc"), accepts(list[int], [1, 2]), accepts(object, "abc")
        (True, False, True, True)
    """
    # An object that is built later.
    if isinstance(value, Mapping) and "_target_" in value:
        return True
    annotation, origin, arguments = _parts(annotation)
    if origin in (Union, types.UnionType):
        return any(accepts(member, value) for member in arguments)
    if origin is Literal:
        return _accepts_literal(arguments, value)
    if origin in _LISTS:
        return _accepts_list(origin, arguments, value)
    if origin in _MAPPINGS:
        return _accepts_mapping(arguments, value)
    return _accepts_plain(annotation, value)


def _accepts_plain(annotation: Any, value: Any) -> bool:
    """Return whether an annotation without arguments allows a value."""
    if annotation in (None, types.NoneType):
        return value is None
    if annotation is bool:
        return isinstance(value, bool)
    if annotation in _NUMBERS:
        # Python counts true and false among the integers.
        if isinstance(value, bool):
            return False
        if annotation is float:
            return isinstance(value, _NUMBERS)
        return isinstance(value, int)
    if annotation in (str, Path):
        # An unquoted 2024 on a command line is a number.
        return isinstance(value, str | int | float)
    return True


def _parts(annotation: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    """Return an annotation without its metadata, its origin and its arguments; the origin of `list` is `list`."""
    while typing.get_origin(annotation) is Annotated:
        annotation = typing.get_args(annotation)[0]
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    is_bare_class = origin is None and isinstance(annotation, type)
    if is_bare_class and annotation in _LISTS + _MAPPINGS:
        origin = annotation
    return annotation, origin, arguments


def _accepts_literal(choices: tuple[Any, ...], value: Any) -> bool:
    # Compare the types as well, because 1 == True.
    return any(value == choice and type(value) is type(choice) for choice in choices)


def _accepts_list(origin: Any, arguments: tuple[Any, ...], value: Any) -> bool:
    if not isinstance(value, list | tuple):
        # A text is a sequence, and a mapping is a collection.
        is_abstract = origin not in (list, tuple)
        return is_abstract and isinstance(value, str | Mapping)
    if not arguments:
        return True
    # A tuple of fixed length.
    if origin is tuple and arguments[-1] is not Ellipsis:
        if len(value) != len(arguments):
            return False
        return all(map(accepts, arguments, value))
    return all(accepts(arguments[0], item) for item in value)


def _accepts_mapping(arguments: tuple[Any, ...], value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    if len(arguments) != 2:
        return True
    key_annotation, item_annotation = arguments
    for key, item in value.items():
        if not accepts(key_annotation, key):
            return False
        if not accepts(item_annotation, item):
            return False
    return True


def annotation_of(parameter: inspect.Parameter, target: Callable[..., Any]) -> Any:
    """Return the evaluated annotation of a parameter; Any if it has none or it cannot be evaluated."""
    annotation = parameter.annotation
    if annotation is parameter.empty:
        return Any
    if not isinstance(annotation, str):
        return annotation

    # Evaluate a text with the names of the module that defines the function.
    function: Any = target
    if isinstance(target, type):
        function = target.__init__  # type: ignore[misc]
    function = inspect.unwrap(function)
    names = getattr(function, "__globals__", {})
    annotated = types.SimpleNamespace(__annotations__={parameter.name: annotation})
    try:
        hints = typing.get_type_hints(annotated, names, include_extras=True)
    except Exception:
        # A name may be imported for type checking alone, and a text may contain anything else.
        return Any
    return hints[parameter.name]


def _agrees_with_default(annotation: Any, parameter: inspect.Parameter) -> bool:
    """Return whether an annotation allows the default; one such as `x: int = None` is not checked."""
    if parameter.default is parameter.empty:
        return True
    return accepts(annotation, parameter.default)


def name_of_type(annotation: Any) -> str:
    """Return an annotation as a program would write it, without the modules of its names."""
    if isinstance(annotation, type) and typing.get_origin(annotation) is None:
        return annotation.__name__
    # Texts between quotes are values of a `Literal`.
    return re.sub(r"""('[^']*'|"[^"]*")|\b(?:[a-zA-Z_]\w*\.)+(?=\w)""", r"\1", str(annotation))
