"""Check values of a configuration against the annotations of the constructor that receives them.

Only what a configuration can express is checked: numbers, texts, true and false, null, lists and mappings of them, and
unions, `Literal` and `Optional`. Every other annotation accepts every value, and so does one that cannot be evaluated.
"""

import collections.abc
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from equipoise.errors import ConfigurationError

__all__ = ["accepts", "check_types"]

_NUMBERS = (int, float)
_LISTS = (
    list,
    tuple,
    collections.abc.Sequence,
    collections.abc.MutableSequence,
    collections.abc.Collection,
    collections.abc.Iterable,
)
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)


def check_types(target: Callable[..., Any], values: Mapping[str, Any], key: str) -> None:
    """Check the arguments of a target that have an annotation.

    Args:
        target: The class or function to call.
        values: Its arguments by name. Names that it does not take are passed over.
        key: The place in the configuration, for the message.

    Raises:
        ConfigurationError: If a value contradicts the annotation of its parameter.

    Example:
        >>> def net(width: int, dropout: float | None = None): ...
        >>> check_types(net, {"width": 64, "dropout": 0.5}, "module")
    """
    try:
        parameters = inspect.signature(target).parameters
    except ValueError:  # a builtin without a signature
        return
    for name, value in values.items():
        parameter = parameters.get(name)
        if parameter is None or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        annotation = _annotation(parameter, target)
        if accepts(annotation, value) or not _trusted(parameter, annotation):
            continue
        shown = "null" if value is None else repr(value)
        way_out = f" If null has a meaning, annotate it as {_describe(annotation)} | None." if value is None else ""
        raise ConfigurationError(
            f"{key}.{name} must be of type {_describe(annotation)}, as {getattr(target, '__name__', target)}"
            f" annotates it; it is {shown}.{way_out}"
        )


def accepts(annotation: Any, value: Any) -> bool:
    """Return whether an annotation allows a value of a configuration.

    Example:
        >>> accepts(float, 1), accepts(float, "abc"), accepts(list[int], [1, 2]), accepts(object, "abc")
        (True, False, True, True)
    """
    if isinstance(value, Mapping) and "_target_" in value:
        return True  # an object yet to be built
    annotation, origin, arguments = _parts(annotation)
    if origin in (Union, types.UnionType):
        return any(accepts(member, value) for member in arguments)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in arguments)
    if origin in _LISTS:
        return _accepts_list(origin, arguments, value)
    if origin in _MAPPINGS:
        return _accepts_mapping(arguments, value)
    if annotation in (None, types.NoneType):
        return value is None
    if annotation is bool:
        return isinstance(value, bool)
    if annotation in _NUMBERS:
        allowed = _NUMBERS if annotation is float else int
        return isinstance(value, allowed) and not isinstance(value, bool)
    if annotation is str or annotation is Path:
        return isinstance(value, str | int | float)  # an unquoted 2024 on a command line is a number
    return True


def _parts(annotation: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    """Return an annotation without its metadata, its origin and its arguments; the origin of `list` is `list`."""
    while typing.get_origin(annotation) is Annotated:
        annotation = typing.get_args(annotation)[0]
    origin = typing.get_origin(annotation)
    if origin is None and isinstance(annotation, type) and annotation in (*_LISTS, *_MAPPINGS):
        origin = annotation
    return annotation, origin, typing.get_args(annotation)


def _accepts_list(origin: Any, arguments: tuple[Any, ...], value: Any) -> bool:
    if not isinstance(value, list | tuple):
        # A text is a sequence, and a mapping is a collection.
        return origin not in (list, tuple) and isinstance(value, str | Mapping)
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        return len(value) == len(arguments) and all(map(accepts, arguments, value))
    return not arguments or all(accepts(arguments[0], item) for item in value)


def _accepts_mapping(arguments: tuple[Any, ...], value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    if len(arguments) != 2:
        return True
    return all(accepts(arguments[0], name) and accepts(arguments[1], item) for name, item in value.items())


def _annotation(parameter: inspect.Parameter, target: Callable[..., Any]) -> Any:
    """Return the evaluated annotation of a parameter; Any where there is none or it cannot be evaluated."""
    if parameter.annotation is parameter.empty:
        return Any
    if not isinstance(parameter.annotation, str):
        return parameter.annotation
    function = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
    names = getattr(inspect.unwrap(function), "__globals__", {})
    holder = types.SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    try:
        return typing.get_type_hints(holder, names, include_extras=True)[parameter.name]
    except Exception:  # a name that is imported for type checking alone, or anything else that a text may contain
        return Any


def _trusted(parameter: inspect.Parameter, annotation: Any) -> bool:
    """Return whether the default agrees with the annotation; `x: int = None` and the like are not to be relied on."""
    return parameter.default is parameter.empty or accepts(annotation, parameter.default)


def _describe(annotation: Any) -> str:
    """Return an annotation as a program would write it."""
    if isinstance(annotation, type) and typing.get_origin(annotation) is None:
        return annotation.__name__
    return str(annotation).replace("typing.", "").replace("collections.abc.", "")
