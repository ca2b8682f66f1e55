"""One comparison for everything a run leaves behind: it names what differs, where, and by how much.

Values are equal when their types, shapes and bits are; a NaN equals a NaN. Lightning's side is the expectation.
"""

import dataclasses
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["assert_same", "differences"]

SHOWN = 25
"""How many differences a failure message lists."""
CONTEXT = 4
"""How many lines of hooks before the first difference a failure message shows."""


def assert_same(expected: Any, actual: Any, title: str, ignore: Sequence[str] = ()) -> None:
    """Fails with a list of all differences.

    Args:
        expected: What Lightning left behind.
        actual: What Equipoise left behind.
        title: What was compared.
        ignore: Fragments of places, such as `"time_elapsed"`; differences there do not count.
    """
    found = [line for line in differences(expected, actual) if not any(part in line.split(": ")[0] for part in ignore)]
    if found:
        more = f"\n  ... and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        listed = "\n  ".join(found[:SHOWN])
        raise AssertionError(f"{title}: Equipoise differs from Lightning in {len(found)} places\n  {listed}{more}")


def differences(expected: Any, actual: Any, place: str = "") -> Iterator[str]:
    """The differences between two values, one line each, beginning with the place."""
    if isinstance(expected, Tensor) and isinstance(actual, Tensor):
        yield from _tensors(expected, actual, place)
    elif isinstance(expected, np.ndarray) and isinstance(actual, np.ndarray):
        yield from _arrays(expected, actual, place)
    elif type(expected) is not type(actual):
        yield f"{place}: {_short(expected)} became {_short(actual)}"
    elif isinstance(expected, Mapping):
        yield from _mappings(expected, actual, place)
    elif isinstance(expected, (list, tuple)):
        yield from _sequences(expected, actual, place)
    elif isinstance(expected, float):
        if struct.pack("d", expected) != struct.pack("d", actual) and not (math.isnan(expected) and math.isnan(actual)):
            yield f"{place}: {expected!r} became {actual!r}"
    elif dataclasses.is_dataclass(expected):
        yield from _mappings(vars(expected), vars(actual), place)
    elif isinstance(expected, (bool, int, str, bytes, PurePath, set, frozenset, type(None), torch.dtype, torch.device)):
        if expected != actual:
            yield f"{place}: {_short(expected)} became {_short(actual)}"
    elif hasattr(expected, "__dict__"):
        yield from _mappings(vars(expected), vars(actual), f"{place}<{type(expected).__name__}>")


def _tensors(expected: Tensor, actual: Tensor, place: str) -> Iterator[str]:
    for name in ("dtype", "shape", "device", "requires_grad"):
        mine, theirs = getattr(actual, name), getattr(expected, name)
        if mine != theirs:
            yield f"{place}.{name}: {theirs} became {mine}"
            return
    yield from _arrays(_bits(expected), _bits(actual), place, expected.detach(), actual.detach())


def _bits(tensor: Tensor) -> np.ndarray:
    flat = tensor.detach().to_dense().contiguous().reshape(-1)
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


def _mappings(expected: Mapping[Any, Any], actual: Mapping[Any, Any], place: str) -> Iterator[str]:
    for key in [*expected, *(key for key in actual if key not in expected)]:
        inner = f"{place}[{key!r}]" if place else str(key)
        if key not in actual:
            yield f"{inner}: missing, Lightning has {_short(expected[key])}"
        elif key not in expected:
            yield f"{inner}: not in Lightning, here {_short(actual[key])}"
        else:
            yield from differences(expected[key], actual[key], inner)


def _sequences(expected: Sequence[Any], actual: Sequence[Any], place: str) -> Iterator[str]:
    if expected and all(isinstance(line, str) for line in expected):
        yield from _lines(expected, actual, place)
        return
    if len(expected) != len(actual):
        yield f"{place}: {len(expected)} entries became {len(actual)}: {_short(expected)} became {_short(actual)}"
        return
    for index, (theirs, ours) in enumerate(zip(expected, actual, strict=True)):
        yield from differences(theirs, ours, f"{place}[{index}]")


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
