"""Build numpy arrays and numbers of a checkpoint, after a check of their description.

Arrays of objects are built of the data that the file holds, with stand-ins among them. Arrays with named fields and
those of derived classes become stand-ins.
"""

import math
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from equipoise.errors import CheckpointError
from equipoise.safe_loading.stand_in import StandIn

__all__ = ["numpy_constructors", "numpy_values", "set_numpy_state"]

_KINDS = "biufcmMSU"  # of items that are plain bytes
_UNITS = (b"generic", b"Y", b"M", b"W", b"D", b"h", b"m", b"s", b"ms", b"us", b"ns", b"ps", b"fs", b"as")
_MOST_UNITS = 1 << 31  # numpy counts them in 32 bits


# What calls make


def _empty_array(kind: Any, shape: Any, code: Any) -> Any:
    numpy = import_module("numpy")
    if isinstance(kind, StandIn):  # a derived class, such as that of matrices
        return kind
    if kind is not numpy.ndarray:
        raise CheckpointError(f"an array is of the class {kind!r}")
    return numpy.empty(0, "u1")


def _dtype(code: Any, align: bool = False, copy: bool = False) -> Any:
    if type(code) is not str:  # a class, such as that of records
        return StandIn("numpy", "dtype")
    dtype = import_module("numpy").dtype(code, copy=True)  # not the one that others share, as its state may be set
    if dtype.kind not in (*_KINDS, "O"):  # it has fields
        return StandIn("numpy", "dtype")
    return dtype


def _scalar(dtype: Any, content: bytes) -> Any:
    numpy = import_module("numpy")
    if isinstance(dtype, StandIn):
        return StandIn("numpy", "void")
    if not isinstance(dtype, numpy.dtype) or dtype.kind not in _KINDS or len(content) != dtype.itemsize:
        raise CheckpointError(f"a number of numpy is {content!r} of type {dtype!r}")
    return numpy.ndarray((1,), dtype, content)[0]


# States


def set_numpy_state(value: Any, state: Any) -> None:
    """Set the state of an array or a dtype that a file has made.

    Args:
        value: The array, still empty, or the dtype.
        state: A tuple, as numpy writes it.

    Raises:
        CheckpointError: If it is not such a tuple.
    """
    if isinstance(value, import_module("numpy").dtype):
        _set_dtype(value, state)
    else:
        _set_array(value, state)


def _set_dtype(dtype: Any, state: Any) -> None:
    """Set the byte order, and the unit of times."""
    order = state[1]
    if order not in ("<", ">", "|", "=") or any(part is not None for part in state[2:5]):
        raise CheckpointError("the type of an array is damaged")
    unit = _checked_unit(state) if dtype.kind in "mM" else None
    if unit is None and order != ">":
        return
    if dtype is import_module("numpy").dtype(dtype.str):
        raise CheckpointError("the type of an array is one that others share")
    if unit is None:
        dtype.__setstate__((3, order, None, None, None, dtype.itemsize, dtype.alignment, 0))
    else:
        dtype.__setstate__((4, order, None, None, None, -1, -1, 0, ({}, unit)))


def _checked_unit(state: Any) -> tuple[bytes, int, int, int] | None:
    """Return the unit of times and how many of it are one step, with a divisor and a count of events."""
    if len(state) < 9:
        return None
    _, (name, *counts) = state[8]
    if name not in _UNITS or len(counts) != 3 or any(type(n) is not int or not 0 < n < _MOST_UNITS for n in counts):
        raise CheckpointError("the unit of an array of times is damaged")
    count, divisor, events = counts
    return name, count, divisor, events


def _set_array(array: Any, state: Any) -> None:
    numpy = import_module("numpy")
    _, shape, dtype, in_columns, content = state
    if isinstance(dtype, StandIn):
        array.__setstate__((1, (), numpy.dtype("O"), False, [StandIn("numpy", "ndarray")]))
        return
    sizes = isinstance(shape, tuple) and all(type(size) is int and size >= 0 for size in shape)
    if not sizes or not isinstance(dtype, numpy.dtype) or dtype.kind not in (*_KINDS, "O"):
        raise CheckpointError(f"an array has the shape {shape!r} and the type {dtype!r}")
    fits = type(content) is bytes  # numpy compares the sizes
    if dtype.kind == "O":
        fits = type(content) is list and len(content) == math.prod(shape)  # numpy does not compare these
    if type(in_columns) is not bool or not fits:
        raise CheckpointError("the content of an array is damaged")
    array.__setstate__((1, shape, dtype, in_columns, content))


# Tables


def numpy_values() -> dict[str, Any]:
    """Return the names of numpy that a checkpoint may use; empty if numpy is not installed."""
    try:
        numpy = import_module("numpy")
    except ModuleNotFoundError:
        return {}
    values = {"numpy.ndarray": numpy.ndarray, "numpy.dtype": numpy.dtype}
    for core in ("numpy.core", "numpy._core"):
        values[f"{core}.multiarray._reconstruct"] = _empty_array
        values[f"{core}.multiarray.scalar"] = _scalar
    return values


@cache
def numpy_constructors() -> dict[int, Callable[..., Any]]:
    """Return what a call of numpy's names calls, by identity."""
    functions: dict[int, Callable[..., Any]] = {id(_empty_array): _empty_array, id(_scalar): _scalar}
    values = numpy_values()
    return {**functions, id(values["numpy.dtype"]): _dtype} if values else {}
