"""Constructors that a checkpoint may call: plain data, with checked arguments.

Python's own classes would do much the same, but `bytearray(10**12)` takes a terabyte, and hashing tuples that are
nested a hundred times takes forever.
"""

import collections
import pathlib
from argparse import Namespace
from collections.abc import Callable, Iterable
from typing import Any

import torch

from equipoise.errors import CheckpointError
from equipoise.safe_loading.arrays import NUMPY_CONSTRUCTORS, NUMPY_VALUES
from equipoise.safe_loading.stand_in import StandIn
from equipoise.safe_loading.tensor_formats import REBUILD

__all__ = ["CONSTRUCTORS", "VALUES", "check_key"]

_PATHS: tuple[type[Any], ...] = (
    pathlib.Path,
    pathlib.PosixPath,
    pathlib.WindowsPath,
    pathlib.PurePath,
    pathlib.PurePosixPath,
    pathlib.PureWindowsPath,
)
# Python 3.13 names the second one in files.
_MODULES_OF_PATHS = ("pathlib", "pathlib._local")
_BUILTINS: tuple[type[Any], ...] = (
    *(bool, bytearray, bytes, complex, dict, float),
    *(frozenset, int, list, set, str, tuple),
)
_CONTAINERS: tuple[type[Any], ...] = (
    collections.Counter,
    collections.OrderedDict,
    collections.defaultdict,
    collections.deque,
)

# A key of a dictionary with more parts than this is refused.
_MOST_PARTS_OF_A_KEY = 1_000


def check_key(key: Any) -> None:
    """Check that a value may be hashed.

    Raises:
        CheckpointError: If it is nested so deeply that hashing it would not end.
    """
    # Count the parts without recursion, and stop early.
    pending = [key]
    for _ in range(_MOST_PARTS_OF_A_KEY):
        if not pending:
            return
        part = pending.pop()
        if isinstance(part, tuple | frozenset):
            pending += part
    raise CheckpointError("a key of a dictionary is nested too deeply")


def _checked_keys(values: Any) -> Any:
    """Return an iterable after a check of its items as keys."""
    if not isinstance(values, list | tuple | dict | set):
        raise CheckpointError(f"the items of a container are a {type(values).__name__}")
    for value in values:
        check_key(value)
    return values


# Plain containers


def _set(values: Iterable[Any] = ()) -> set[Any]:
    return set(_checked_keys(values))


def _frozenset(values: Iterable[Any] = ()) -> frozenset[Any]:
    return frozenset(_checked_keys(values))


def _counter(counts: Any = ()) -> collections.Counter[Any]:
    return collections.Counter(_checked_keys(counts))


def _ordered_dict(pairs: Any = ()) -> collections.OrderedDict[Any, Any]:
    result: collections.OrderedDict[Any, Any] = collections.OrderedDict()
    for key, value in pairs:
        check_key(key)
        result[key] = value
    return result


def _defaultdict(factory: Any = None) -> collections.defaultdict[Any, Any]:
    if not _is_factory(factory):
        raise CheckpointError(f"a defaultdict has the factory {factory!r}")
    return collections.defaultdict(factory)


def _is_factory(factory: Any) -> bool:
    """Return whether a dictionary may call this for its missing items."""
    if factory is None or isinstance(factory, StandIn):
        return True
    return any(factory is kind for kind in _BUILTINS + _CONTAINERS)


def _deque(values: Any = (), length: int | None = None) -> collections.deque[Any]:
    if not isinstance(values, list | tuple):
        raise CheckpointError(f"the items of a deque are a {type(values).__name__}")
    return collections.deque(values, length)


# Plain values


def _encode(text: str, encoding: str = "utf-8") -> bytes:
    if encoding not in ("latin1", "latin-1", "ascii", "utf-8"):
        raise CheckpointError(f"bytes are encoded as {encoding!r}")
    return str.encode(text, encoding)


def _bytes(content: Any = b"") -> bytes:
    if not isinstance(content, bytes | bytearray | list | tuple):
        raise CheckpointError(f"the content of bytes is a {type(content).__name__}")
    return bytes(content)


def _bytearray(content: Any = b"", encoding: str = "latin-1") -> bytearray:
    # Pickles of protocol 2 hold bytes as text.
    if isinstance(content, str):
        encoded = _encode(content, encoding)
    else:
        encoded = _bytes(content)
    return bytearray(encoded)


def _complex(real: float = 0.0, imaginary: float = 0.0) -> complex:
    return complex(real, imaginary)


def _path(*parts: str) -> pathlib.Path:
    return pathlib.Path(*parts)


def _stand_in(module: str, name: str) -> StandIn:
    return StandIn(str(module), str(name))


def _size(sizes: Any = ()) -> torch.Size:
    return torch.Size(sizes)


def _layout(name: str) -> torch.layout:
    layout = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(layout, torch.layout):
        raise CheckpointError(f"{name!r} is no layout of tensors")
    return layout


# Tables

# Names in a file, with the values that they stand for.
VALUES: dict[str, Any] = {
    **{f"builtins.{kind.__name__}": kind for kind in _BUILTINS},
    **{f"collections.{kind.__name__}": kind for kind in _CONTAINERS},
    **{f"{module}.{kind.__name__}": kind for module in _MODULES_OF_PATHS for kind in _PATHS},
    **NUMPY_VALUES,
    **REBUILD,
    "_codecs.encode": _encode,
    "argparse.Namespace": Namespace,
    "equipoise.safe_loading.stand_in.StandIn": StandIn,
    "torch.Size": torch.Size,
    "torch.Tensor": torch.Tensor,
    "torch.device": torch.device,
    "torch.nn.parameter.Parameter": torch.nn.Parameter,
    "torch.serialization._get_layout": _layout,
}

_CALLED_AS_THEY_ARE: tuple[Callable[..., Any], ...] = (
    _encode,
    _layout,
    torch.device,
    *REBUILD.values(),
)

# The function that is called in place of a value of the table above, by the identity of that value.
# Values that are not among these keys cannot be called.
CONSTRUCTORS: dict[int, Callable[..., Any]] = {
    **{id(kind): _path for kind in _PATHS},
    **{id(function): function for function in _CALLED_AS_THEY_ARE},
    **NUMPY_CONSTRUCTORS,
    id(bytearray): _bytearray,
    id(bytes): _bytes,
    id(complex): _complex,
    id(frozenset): _frozenset,
    id(set): _set,
    id(collections.Counter): _counter,
    id(collections.OrderedDict): _ordered_dict,
    id(collections.defaultdict): _defaultdict,
    id(collections.deque): _deque,
    id(torch.Size): _size,
    id(StandIn): _stand_in,
}
