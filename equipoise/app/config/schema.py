"""Structured configurations made from the signatures of constructors.

A parameter becomes a field of the same name and default. Its type is kept where a configuration can check it, and is
`Any` where it cannot, such as for a count or a list of devices; then the constructor checks.
"""

import enum
import inspect
import os
import re
import sys
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Any, Literal, Union

import torch

__all__ = ["config_class", "option_name"]

_PLAIN = (bool, int, float, str)
_REQUIRED = "???"  # what OmegaConf reads as a value that must be given


def config_class(target: type, *, leave_out: Collection[str] = ()) -> type:
    """Makes the dataclass that configures a class.

    Args:
        target: The class to build; `_target_` names it.
        leave_out: Parameters that are not part of the configuration. Default: none.

    Returns:
        A dataclass with a field for each parameter. A parameter without a default must be given in the configuration.
        One whose default cannot be written down, such as a function, has no field: the constructor's default stands.

    Example:
        >>> from lightning.pytorch.callbacks import EarlyStopping
        >>> config_class(EarlyStopping)(monitor="val_loss").patience
        3
    """
    fields: list[tuple[str, Any, Any]] = [
        ("_target_", str, field(default=f"{target.__module__}.{target.__qualname__}"))
    ]
    for parameter in inspect.signature(target).parameters.values():
        if parameter.name in leave_out or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        default = _default(parameter.default)
        if default is not None:
            fields.append((parameter.name, _field_type(parameter, target), default))
    return make_dataclass(f"{target.__name__}Config", fields)


def option_name(target: type) -> str:
    """The name under which a class is chosen: that of its module, EarlyStopping's being early_stopping.

    Example:
        >>> option_name(dict)
        'dict'
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", target.__name__).lower()


def _default(value: Any) -> Any | None:
    """A field with this default; None if it cannot be written down."""
    if value is inspect.Parameter.empty:
        return field(default=_REQUIRED)
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, torch.device | Path):
        value = str(value)
    if value is None or isinstance(value, _PLAIN):
        return field(default=value)
    if isinstance(value, list | tuple) and all(isinstance(item, _PLAIN) for item in value):
        return field(default_factory=lambda: list(value))
    if isinstance(value, Mapping) and all(isinstance(item, _PLAIN) for pair in value.items() for item in pair):
        return field(default_factory=lambda: dict(value))
    return None


def _field_type(parameter: inspect.Parameter, target: type) -> Any:
    """The parameter's type as OmegaConf can check it."""
    # A name that is imported for type checking alone cannot be evaluated.
    holder = types.SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    try:
        annotation = typing.get_type_hints(holder, vars(sys.modules[target.__module__]))[parameter.name]
    except NameError:
        return Any
    checked = _checked(annotation)
    return checked | None if parameter.default is None and checked is not Any else checked


def _checked(annotation: Any) -> Any:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        members = [_checked(member) for member in arguments if member is not types.NoneType]
        optional = types.NoneType in arguments
        if len(members) > 1 and any(member is Any or typing.get_origin(member) in (list, dict) for member in members):
            return Any
        return Union[(*members, *[None] * optional)] if Any not in members else Any
    if origin is Literal:
        kinds = {type(value) for value in arguments}
        return Union[tuple(kinds)] if kinds <= set(_PLAIN) else Any  # noqa: UP007
    if origin in (list, dict):
        return annotation if arguments and all(argument in _PLAIN for argument in arguments) else Any
    if annotation is Path or (origin or annotation) is os.PathLike:
        return str
    return annotation if annotation in _PLAIN else Any
