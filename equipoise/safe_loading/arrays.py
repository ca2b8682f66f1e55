"""Build numpy arrays and numbers of a checkpoint, after a check of their description.

Arrays of objects are built of the data that the file holds, with stand-ins among them. Arrays with named fields and
those of derived classes become stand-ins.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy

from equipoise.errors import CheckpointError
from equipoise.safe_loading.stand_in import StandIn

__all__ = ["NUMPY_CONSTRUCTORS", "NUMPY_VALUES", "set_numpy_state"]

# The kinds of dtypes whose items are plain bytes.
_KINDS = "biufcmMSU"

_UNITS = (b"generic", b"Y", b"M", b"W", b"D", b"h", b"m", b"s", b"ms", b"us", b"ns", b"ps", b"fs", b"as")

# Numpy counts units in 32 bits.
_MOST_UNITS = 1 << 31


# Functions that a file calls


def _empty_array(kind: Any, shape: Any, code: Any) -> Any:
    # A derived class, such as that of matrices.
    if isinstance(kind, StandIn):
        return kind
    if kind is not numpy.ndarray:
        raise CheckpointError(f"an array is of the class {kind!r}")
    return numpy.empty(0, "u1")


def _dtype(code: Any, align: bool = False, copy: bool = False) -> Any:
    # The code is a class for arrays of records, for example.
    if type(code) is not str:
        return StandIn("numpy", "dtype")
    # Numpy shares one object for each dtype. Its state may be set below, so a copy is needed.
    dtype = numpy.dtype(code, copy=True)
    # All other dtypes have fields.
    if not _is_supported(dtype):
        return StandIn("numpy", "dtype")
    return dtype


def _is_supported(dtype: Any) -> bool:
    """Return whether the items of a dtype are plain bytes or objects."""
    return dtype.kind == "O" or dtype.kind in _KINDS


def _scalar(dtype: Any, content: bytes) -> Any:
    if isinstance(dtype, StandIn):
        return StandIn("numpy", "void")
    fits = False
    if isinstance(dtype, numpy.dtype) and dtype.kind in _KINDS:
        fits = len(content) == dtype.itemsize
    if not fits:
        raise CheckpointError(f"a number of numpy is {content!r} of type {dtype!r}")
    return numpy.ndarray((1,), dtype, content)[0]


# States


def set_numpy_state(value: Any, state: Any) -> None:
    """Set the state of an array or a dtype that a file has created.

    Args:
        value: The array, still empty, or the dtype.
        state: A tuple, as numpy writes it.

    Raises:
        CheckpointError: If it is not such a tuple.
    """
    if isinstance(value, numpy.dtype):
        _set_dtype(value, state)
    else:
        _set_array(value, state)


def _set_dtype(dtype: Any, state: Any) -> None:
    """Set the byte order, and the unit of times."""
    # 1. Check the state.
    order = state[1]
    fields = state[2:5]
    if order not in ("<", ">", "|", "="):
        raise CheckpointError("the type of an array is damaged")
    if any(field is not None for field in fields):
        raise CheckpointError("the type of an array is damaged")
    unit = None
    if dtype.kind in "mM":
        unit = _checked_unit(state)

    # 2. Nothing needs to be set in most cases: the dtype was created from its code.
    if unit is None and order != ">":
        return
    if dtype is numpy.dtype(dtype.str):
        raise CheckpointError("the type of an array is one that others share")

    # 3. Set the state, as numpy writes it: version, byte order, three descriptions of fields, size, alignment, flags,
    #    and for times the metadata.
    no_fields = (None, None, None)
    if unit is None:
        dtype.__setstate__((3, order, *no_fields, dtype.itemsize, dtype.alignment, 0))
    else:
        metadata: tuple[Any, ...] = ({}, unit)
        dtype.__setstate__((4, order, *no_fields, -1, -1, 0, metadata))


def _checked_unit(state: Any) -> tuple[bytes, int, int, int] | None:
    """Return the unit of times and how many of it are one step, with a divisor and a count of events."""
    if len(state) < 9:
        return None
    _, (name, *numbers) = state[8]
    if name not in _UNITS or len(numbers) != 3:
        raise CheckpointError("the unit of an array of times is damaged")
    for number in numbers:
        if type(number) is not int or not 0 < number < _MOST_UNITS:
            raise CheckpointError("the unit of an array of times is damaged")
    count, divisor, events = numbers
    return name, count, divisor, events


def _set_array(array: Any, state: Any) -> None:
    """Set the shape, the dtype and the content of an array."""
    _, shape, dtype, is_column_major, content = state

    # 1. An array of an unsupported dtype becomes an array with one stand-in.
    if isinstance(dtype, StandIn):
        objects = numpy.dtype("O")
        items = [StandIn("numpy", "ndarray")]
        array.__setstate__((1, (), objects, False, items))
        return

    # 2. Check the state.
    is_dtype = isinstance(dtype, numpy.dtype) and _is_supported(dtype)
    if not is_dtype or not _is_shape(shape):
        raise CheckpointError(f"an array has the shape {shape!r} and the type {dtype!r}")
    if type(is_column_major) is not bool:
        raise CheckpointError("the content of an array is damaged")
    if not _is_content(content, dtype, shape):
        raise CheckpointError("the content of an array is damaged")

    # 3. Set it.
    array.__setstate__((1, shape, dtype, is_column_major, content))


def _is_shape(shape: Any) -> bool:
    if not isinstance(shape, tuple):
        return False
    return all(type(size) is int and size >= 0 for size in shape)


def _is_content(content: Any, dtype: Any, shape: tuple[int, ...]) -> bool:
    # Numpy compares the number of bytes with the shape, but not the number of objects.
    if dtype.kind != "O":
        return type(content) is bytes
    if type(content) is not list:
        return False
    return len(content) == math.prod(shape)


# Tables


# Names in a file, with the values that they stand for.
NUMPY_VALUES: dict[str, Any] = {"numpy.ndarray": numpy.ndarray, "numpy.dtype": numpy.dtype}
for _core in ("numpy.core", "numpy._core"):
    NUMPY_VALUES[f"{_core}.multiarray._reconstruct"] = _empty_array
    NUMPY_VALUES[f"{_core}.multiarray.scalar"] = _scalar

# The function that is called in place of each of these values, by the identity of that value.
NUMPY_CONSTRUCTORS: dict[int, Callable[..., Any]] = {
    id(_empty_array): _empty_array,
    id(_scalar): _scalar,
    id(numpy.dtype): _dtype,
}
