"""Find the part of an object that cannot be pickled, for a message that names it."""

import re
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from equipoise.parallel.payload.object_pickling import can_be_packed

__all__ = ["explain", "find_unpicklable"]

# Name and value of a part of an object.
Part = tuple[str, Any]

# Types that hold the user's objects on their way.
_CONTAINERS = (tuple, list, dict, partial, FunctionType)
# A submodule, parameter or buffer in the dictionary of its module.
_REGISTERED = re.compile(r"\._(?:modules|parameters|buffers)\['(.*?)'\]", re.DOTALL)


def find_unpicklable(value: Any) -> tuple[str, Any]:
    """Return the innermost part of an object that cannot be pickled.

    Args:
        value: Object that cannot be pickled.

    Returns:
        The path to that part from the object that holds it, such as `Classifier.stream`, and the part.
    """
    # Objects from the first to the innermost, and the name of each within the one before it.
    chain = [value]
    names = [""]
    while True:
        culprit = _first_unpicklable_part(value, chain)
        if culprit is None:
            return _path(chain, names), value
        name, value = culprit
        names.append(name)
        chain.append(value)


def _first_unpicklable_part(value: Any, chain: list[Any]) -> Part | None:
    """Return the name and the value of the first part that cannot be pickled; None if all parts can.

    The objects of the chain, which hold `value`, count as picklable: a part that refers back to them is not the cause.
    """
    for name, part in _parts(value):
        is_in_chain = any(part is holder for holder in chain)
        if is_in_chain:
            continue
        is_packable = can_be_packed(part, chain)
        if not is_packable:
            return name, part
    return None


def _path(chain: list[Any], names: list[str]) -> str:
    """Return the path to the last object of a chain, from the first object of the user on."""
    # Skip the containers in which the user's objects travel.
    start = len(chain) - 1
    for index, holder in enumerate(chain):
        if not _is_internal(holder):
            start = index
            break
    path = "".join(names[start + 1 :])
    first = chain[start]
    if isinstance(first, type):
        return f"{first.__name__}{path}"
    # A module's registered objects read as attributes: `._modules['head']` becomes `.head`.
    path = _REGISTERED.sub(r".\1", path)
    return f"{type(first).__name__}{path}"


def _is_internal(value: Any) -> bool:
    """Return True for an object that only carries the user's objects."""
    if isinstance(value, _CONTAINERS):
        return True
    package, _, _ = type(value).__module__.partition(".")
    return package == "equipoise"


def _parts(value: Any) -> list[Part]:
    """Return the names and values of all that pickle sends with an object."""
    # 1. Items of containers, by their keys or positions; items of sets have none.
    if isinstance(value, dict):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [(f"[{index}]", item) for index, item in enumerate(value)]
    if isinstance(value, set | frozenset):
        return [("{...}", item) for item in value]
    # 2. Functions, which may hold objects.
    if isinstance(value, partial):
        return [("", part) for part in (value.func, *value.args, *value.keywords.values())]
    if isinstance(value, FunctionType):
        return _parts_of_function(value)
    if isinstance(value, MethodType):
        return [("", value.__self__), ("", value.__func__)]
    # 3. Classes and other objects.
    if isinstance(value, type):
        return _parts_of_class(value)
    return _parts_of_object(value)


def _parts_of_class(value: type) -> list[Part]:
    """Return the members of a class of the script; pickle looks other classes up by name."""
    if value.__module__ != "__main__":
        return []
    members = dict(vars(value))
    # Python creates these for every class.
    members.pop("__dict__", None)
    members.pop("__weakref__", None)
    return _as_attributes(members)


def _as_attributes(values: dict[str, Any]) -> list[Part]:
    """Return parts that are read as attributes of these names."""
    return [(f".{name}", part) for name, part in values.items()]


def _parts_of_object(value: Any) -> list[Part]:
    """Return the attributes of an object, those in slots included, and its class."""
    # 1. Attributes.
    parts = _as_attributes(getattr(value, "__dict__", {}))
    # 2. Slots, which may be empty.
    kind = type(value)
    slots = {}
    for base in kind.__mro__:
        for slot in _slots(base):
            if hasattr(value, slot):
                slots[slot] = getattr(value, slot)
    parts += _as_attributes(slots)
    # 3. The class.
    parts.append(("", kind))
    return parts


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    if isinstance(slots, str):
        return (slots,)
    return tuple(slots)


def _parts_of_function(function: FunctionType) -> list[Part]:
    """Return what a function that is sent as a whole takes along: its closure, globals and attributes."""
    # 1. Variables of the functions around it.
    code = function.__code__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=False)
    enclosed = {name: cell.cell_contents for name, cell in cells}
    # 2. Global variables that it names.
    all_globals = function.__globals__
    used_globals = {name: all_globals[name] for name in code.co_names if name in all_globals}
    # 3. Attributes.
    return [*_as_attributes(enclosed), *_as_attributes(used_globals), *_as_attributes(vars(function))]


def explain(value: Any, error: Exception) -> str:
    """Return a message that names the part which cannot be pickled."""
    path, part = find_unpicklable(value)
    path = path.removeprefix("Request.")
    name = type(part).__name__
    subject = f"A {name}"
    if path != name:
        subject = f"{path} is a {name}, which"
    return (
        f"{subject} cannot be sent to other processes: {error}. Create it in `setup` or"
        " on first use, in `configure_model` if it is a layer, or leave it out in `__getstate__`."
    )
