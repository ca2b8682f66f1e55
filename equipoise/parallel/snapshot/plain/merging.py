"""Changes of a checkpoint's run in a run that is constructed otherwise."""

from argparse import Namespace
from collections.abc import Mapping
from copy import copy
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch

from equipoise.notices import rank_zero_warn
from equipoise.parallel.snapshot.plain.paths import Root
from equipoise.parallel.snapshot.plain.places import find, text_of
from equipoise.parallel.snapshot.plain.restoring import restore
from equipoise.parallel.snapshot.plain.state import UNKNOWN, PlainState, State, saved_values

__all__ = ["bring_back"]


def bring_back(
    roots: Mapping[str, Root], state: State, present_run: PlainState, device: torch.device, already_named: set[str]
) -> None:
    """Bring changes back. What the present run was constructed with otherwise stays, with a warning.

    Args:
        roots: The objects of the present run.
        state: The changes.
        present_run: The state of the present run when it began.
        device: See `restore`.
        already_named: Places that a warning has named, to which those of this one are added.
    """
    values = []
    lost: list[str] = []
    for saved in saved_values(state):
        path = saved.path
        noted = present_run.noted(path)
        present_start = UNKNOWN if noted is None else noted.start
        # In this run it may have been replaced as well.
        was_replaced = saved.was_replaced and present_run.has_noted(path, find(roots, path))
        place = text_of(path)
        value = saved.value
        are_comparable = saved.start is not UNKNOWN and present_start is not UNKNOWN
        if are_comparable and _is_argument(roots, path):
            value = _merged(saved.start, saved.value, present_start, place, lost)
        if place not in lost:
            values.append([path, value, saved.is_elsewhere, was_replaced])
    new = [place for place in lost if place not in already_named]
    already_named.update(new)
    if new:
        rank_zero_warn(
            "The resumed run was constructed with other values than the checkpoint's run, and hooks or steps had"
            f" changed these since: {', '.join(new)}. The new values stay, and those changes are left out."
            " To continue with the changed values, construct the objects as before."
        )
    restore(roots, {**state, "values": values}, device)


def _is_argument(roots: Mapping[str, Root], path: list[Any]) -> bool:
    """Return whether what a path leads to is named like an argument of its owner's constructor.

    Other attributes may differ since the same objects had been in an earlier run: counters, and lists that hooks fill.
    """
    last = max(number for number, step in enumerate(path) if isinstance(step, str))
    owner = find(roots, path[:last])
    if isinstance(owner, Namespace | SimpleNamespace):
        return True
    try:
        arguments = signature(type(owner)).parameters
    except (ValueError, TypeError):
        return False
    return path[last].lstrip("_") in arguments


def _merged(start: Any, saved: Any, present: Any, place: str, lost: list[str]) -> Any:
    """Return a saved value in which what had not changed since the start is that of the present run.

    Where both differ from the start, the present value stays, and `lost` takes the place.
    """
    if _is_same(start, present) or _is_same(saved, present):
        return saved
    if isinstance(start, dict) and isinstance(saved, dict) and isinstance(present, dict):
        items = {}
        for key, item in saved.items():
            items[key] = item
            if key in start and key in present:
                items[key] = _merged(start[key], item, present[key], f"{place}[{key!r}]", lost)
        # What was there at the start and is not saved was removed; the present run has added the rest.
        for key, item in present.items():
            if key not in saved and key not in start:
                items[key] = item
        # Of the same kind.
        result = copy(saved)
        result.clear()
        result.update(items)
        return result
    if not _is_same(saved, start):
        lost.append(place)
    return present


def _is_same(one: Any, other: Any) -> bool:
    # Equal sets may have other texts.
    if isinstance(one, set) and isinstance(other, set) and one == other:
        return True
    # By texts, since NaN differs from itself. Starts hold no tensors.
    return repr(one) == repr(other)
