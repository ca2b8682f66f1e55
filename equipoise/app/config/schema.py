"""Structured configurations derived from the signatures of constructors.

A parameter becomes a field of the same name and default. The field has the parameter's type if a configuration can
check that. Otherwise, as for a count or a list of devices, it has the type `Any`, and the constructor checks the value.
"""

import enum
import inspect
import os
import re
import sys
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Any, Literal, Union

import torch

__all__ = ["config_class", "option_name"]

_PLAIN = (bool, int, float, str)

# OmegaConf refuses to read a value that is still this text.
_REQUIRED = "???"


def config_class(target: type, *, leave_out: Collection[str] = ()) -> type:
    """Return the dataclass that configures a class.

    Args:
        target: The class to build; `_target_` names it.
        leave_out: Names of parameters that are not part of the configuration. Default: none.

    Returns:
        A dataclass with a field for each parameter. The configuration must give a value for a parameter without a
        default. A parameter whose default cannot be written down, such as a function, has no field; the constructor's
        default applies.

    Example:
        >>> from lightning.pytorch.callbacks import EarlyStopping
        >>> config_class(EarlyStopping)(monitor="val_loss").patience
        3
    """
    path = f"{target.__module__}.{target.__qualname__}"
    fields: list[tuple[str, Any, Any]] = [("_target_", str, field(default=path))]
    for parameter in inspect.signature(target).parameters.values():
        if parameter.name in leave_out:
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        default = _default(parameter.default)
        if default is None:
            continue
        field_type = _field_type(parameter, target)
        fields.append((parameter.name, field_type, default))
    return make_dataclass(f"{target.__name__}Config", fields)


def option_name(target: type) -> str:
    """Return the name of the option for a class: its name in snake case, such as early_stopping.

    Example:
        >>> option_name(dict)
        'dict'
    """
    # Between a small and a capital letter, and before the last of several capitals.
    boundary = r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"
    return re.sub(boundary, "_", target.__name__).lower()


def _default(value: Any) -> Any | None:
    """Return a field with this default; None if it cannot be written down."""
    if value is inspect.Parameter.empty:
        return field(default=_REQUIRED)
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, torch.device | Path):
        value = str(value)
    if value is None or isinstance(value, _PLAIN):
        return field(default=value)
    if isinstance(value, list | tuple) and _are_plain(value):
        return field(default_factory=lambda: list(value))
    if isinstance(value, Mapping) and _are_plain(value.keys()) and _are_plain(value.values()):
        return field(default_factory=lambda: dict(value))
    return None


def _are_plain(values: Iterable[Any]) -> bool:
    return all(isinstance(value, _PLAIN) for value in values)


def _field_type(parameter: inspect.Parameter, target: type) -> Any:
    """Return a type that OmegaConf can check, for a parameter."""
    names = vars(sys.modules[target.__module__])
    annotated = types.SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    try:
        hints = typing.get_type_hints(annotated, names)
    except NameError:
        # A name that is imported for type checking alone cannot be evaluated.
        return Any
    checkable = _checkable(hints[parameter.name])
    if checkable is Any:
        return Any
    if parameter.default is None:
        return checkable | None
    return checkable


def _checkable(annotation: Any) -> Any:
    """Return the type that OmegaConf can check in place of an annotation; Any if there is none."""
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return _checkable_union(arguments)
    if origin is Literal:
        # OmegaConf knows no literals; it checks their types.
        kinds = tuple({type(value) for value in arguments})
        if not _are_plain_types(kinds):
            return Any
        return Union[kinds]  # noqa: UP007
    if origin in (list, dict):
        if arguments and _are_plain_types(arguments):
            return annotation
        return Any
    if annotation is Path:
        return str
    if os.PathLike in (origin, annotation):
        return str
    if annotation in _PLAIN:
        return annotation
    return Any


def _checkable_union(arguments: tuple[Any, ...]) -> Any:
    """Return the union of the types that OmegaConf can check; it knows no unions with lists or dictionaries."""
    members = []
    for argument in arguments:
        if argument is not types.NoneType:
            member = _checkable(argument)
            members.append(member)
    if Any in members:
        return Any
    if len(members) > 1:
        for member in members:
            if typing.get_origin(member) in (list, dict):
                return Any
    if types.NoneType in arguments:
        members.append(None)
    return Union[tuple(members)]  # noqa: UP007


def _are_plain_types(kinds: Iterable[Any]) -> bool:
    return all(kind in _PLAIN for kind in kinds)
