"""Structured configurations derived from the signatures of constructors.

A parameter becomes a field of the same name and default. OmegaConf converts values of the plain types. Values of all
other types are checked later, as those of the user's own classes are, by `annotations`.
"""

import enum
import inspect
import os
import re
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Any

import torch

from equipoise.app.config.annotations import annotation_of

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
    fields: list[tuple[str, Any, Any]] = [
        ("_target_", str, field(default=f"{target.__module__}.{target.__qualname__}"))
    ]
    for parameter in inspect.signature(target).parameters.values():
        if parameter.name in leave_out:
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        default = _default(parameter.default)
        if default is None:
            continue
        kind = _field_type(annotation_of(parameter, target), parameter.default)
        fields.append((parameter.name, kind, default))
    return make_dataclass(f"{target.__name__}Config", fields)


def option_name(target: type) -> str:
    """Return the name of the option for a class: its name in snake case, such as early_stopping.

    Example:
        >>> option_name(dict)
        'dict'
    """
    # Between a small letter or a digit and a capital letter, and before the last of several capitals.
    boundary = r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"
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
    if isinstance(value, Mapping) and _are_plain([*value.keys(), *value.values()]):
        return field(default_factory=lambda: dict(value))
    return None


def _field_type(annotation: Any, default: Any) -> Any:
    """Return the type to which a value is converted, such as the text of a variable of the environment; else Any."""
    # 1. The members of a union, without None.
    members = [annotation]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = list(typing.get_args(annotation))
    kinds = [member for member in members if member is not types.NoneType]

    # 2. Their type, if there is one. A folder may be named by a number, such as 2024.
    kind = kinds[0] if len(kinds) == 1 else None
    if all(map(_is_path, kinds)):
        kind = str
    if kind not in _PLAIN:
        return Any
    is_optional = default is None or types.NoneType in members
    if is_optional:
        return kind | None
    return kind


def _is_path(kind: Any) -> bool:
    return kind in (str, Path) or os.PathLike in (kind, typing.get_origin(kind))


def _are_plain(values: Iterable[Any]) -> bool:
    return all(isinstance(value, _PLAIN) for value in values)
