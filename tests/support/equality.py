"""One comparison for everything a run leaves behind: it names what differs, where, and by how much.

Without a tolerance, values are equal when their types, shapes and bits are; a NaN equals a NaN.
"""

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.parallel.equality import Tolerance, gap_of

__all__ = ["assert_equal", "differences"]

SHOWN = 25
"""How many differences a failure message lists."""
CONTEXT = 4
"""How many lines of hooks before the first difference a failure message shows."""


def assert_equal(
    expected: Any, actual: Any, tolerance: float = 0.0, *, title: str = "", ignore: Sequence[str] = ()
) -> None:
    """Assert that two values are equal; the message lists the first differences, each with its place.

    Args:
        expected: A nested value of tensors, arrays, modules (their `state_dict`), data classes and plain values.
        actual: The value that was computed in its place.
        tolerance: Largest difference of floating-point values, both relative to the largest element of the expected
            tensor and absolute. Default: 0, so that their bits, dtypes and devices count.
        title: What was compared, as the beginning of the message. Default: none.
        ignore: Fragments of places, such as `"time_elapsed"`; differences there do not count. Default: none.
    """
    found = [
        line
        for line in differences(expected, actual, tolerance=tolerance)
        if not any(part in line.split(": ")[0] for part in ignore)
    ]
    if found:
        more = f"\n  ... and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        listed = "\n  ".join(found[:SHOWN])
        raise AssertionError(f"{title or 'Values'} differ in {len(found)} places\n  {listed}{more}")


def differences(expected: Any, actual: Any, place: str = "", tolerance: float = 0.0) -> Iterator[str]:
    """Yield the differences between two values, one line each, beginning with the place."""
    if isinstance(expected, nn.Module) and isinstance(actual, nn.Module):
        expected, actual = expected.state_dict(), actual.state_dict()
    if tolerance and isinstance(expected, (Tensor, float)) and isinstance(actual, (Tensor, float)):
        gap = gap_of(torch.as_tensor(expected, dtype=torch.float64), actual, Tolerance(tolerance, tolerance))
        if gap:
            yield f"{place}{list(gap.place)}: {_short(expected)} became {_short(actual)}{gap}"
    elif isinstance(expected, Tensor) and isinstance(actual, Tensor):
        yield from _tensors(expected, actual, place)
    elif isinstance(expected, np.ndarray) and isinstance(actual, np.ndarray):
        yield from _arrays(expected, actual, place)
    elif type(expected) is not type(actual):
        yield f"{place}: {_short(expected)} became {_short(actual)}"
    elif isinstance(expected, Mapping):
        yield from _mappings(expected, actual, place, tolerance)
    elif isinstance(expected, (list, tuple)):
        yield from _sequences(expected, actual, place, tolerance)
    elif isinstance(expected, float):
        if struct.pack("d", expected) != struct.pack("d", actual) and not (math.isnan(expected) and math.isnan(actual)):
            yield f"{place}: {expected!r} became {actual!r}"
    elif is_dataclass(expected):
        yield from _mappings(_fields(expected), _fields(actual), place, tolerance)
    elif isinstance(expected, (bool, int, str, bytes, PurePath, set, frozenset, type(None), torch.dtype, torch.device)):
        if expected != actual:
            yield f"{place}: {_short(expected)} became {_short(actual)}"
    elif hasattr(expected, "__dict__"):
        yield from _mappings(vars(expected), vars(actual), f"{place}<{type(expected).__name__}>", tolerance)


def _tensors(expected: Tensor, actual: Tensor, place: str) -> Iterator[str]:
    for name in ("dtype", "shape", "device", "requires_grad"):
        mine, theirs = getattr(actual, name), getattr(expected, name)
        if mine != theirs:
            yield f"{place}.{name}: {theirs} became {mine}"
            return
    yield from _arrays(_bits(expected), _bits(actual), place, expected.detach(), actual.detach())


def _bits(tensor: Tensor) -> np.ndarray:
    flat = tensor.detach().cpu().to_dense().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).reshape(flat.numel(), -1).numpy() if flat.numel() else np.empty((0, 1))


def _arrays(expected: Any, actual: Any, place: str, left: Any = None, right: Any = None) -> Iterator[str]:
    left, right = (expected, actual) if left is None else (left, right)
    if expected.shape != actual.shape:
        yield f"{place}.shape: {expected.shape} became {actual.shape}"
        return
    differ = (expected != actual).reshape(len(expected), -1).any(axis=1) if expected.size else np.zeros(0, dtype=bool)
    if differ.any():
        first = int(differ.argmax())
        before, after = left.reshape(-1)[first].item(), right.reshape(-1)[first].item()
        count = f"{int(differ.sum())} of {len(differ)}"
        yield f"{place}: {count} values differ, first [{first}]: {before!r} became {after!r}"


def _fields(value: Any) -> dict[str, Any]:
    """Return what a data class holds, which may be in slots."""
    return {**getattr(value, "__dict__", {}), **{each.name: getattr(value, each.name) for each in fields(value)}}


def _mappings(expected: Mapping[Any, Any], actual: Mapping[Any, Any], place: str, tolerance: float) -> Iterator[str]:
    for key in [*expected, *(key for key in actual if key not in expected)]:
        inner = f"{place}[{key!r}]" if place else str(key)
        if key not in actual:
            yield f"{inner}: missing, expected {_short(expected[key])}"
        elif key not in expected:
            yield f"{inner}: not expected, here {_short(actual[key])}"
        else:
            yield from differences(expected[key], actual[key], inner, tolerance)


def _sequences(expected: Sequence[Any], actual: Sequence[Any], place: str, tolerance: float) -> Iterator[str]:
    if expected and all(isinstance(line, str) for line in expected):
        yield from _lines(expected, actual, place)
        return
    if len(expected) != len(actual):
        yield f"{place}: {len(expected)} entries became {len(actual)}: {_short(expected)} became {_short(actual)}"
        return
    for index, (theirs, ours) in enumerate(zip(expected, actual, strict=True)):
        yield from differences(theirs, ours, f"{place}[{index}]", tolerance)


def _lines(expected: Sequence[str], actual: Sequence[str], place: str) -> Iterator[str]:
    """One entry for the first line that differs, with the lines before it."""
    for index in range(max(len(expected), len(actual))):
        theirs = expected[index] if index < len(expected) else "(the end)"
        ours = actual[index] if index < len(actual) else "(the end)"
        if theirs != ours:
            before = "".join(f"\n      {line}" for line in expected[max(0, index - CONTEXT) : index])
            yield f"{place}[{index}]: of {len(expected)} and {len(actual)} lines{before}\n    - {theirs}\n    + {ours}"
            return


def _short(value: Any) -> str:
    text = f"{type(value).__name__} {value!r}" if not isinstance(value, (str, type(None))) else repr(value)
    return text if len(text) <= 160 else text[:157] + "..."
