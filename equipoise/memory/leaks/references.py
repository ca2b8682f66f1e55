"""References that keep an object alive, as a path of names."""

import functools
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor, nn

__all__ = ["find_holders", "find_tensors", "globals_of_user", "is_of_user"]

_MOST_VISITED = 200_000
_MOST_ELEMENTS = 1000  # of a container, its last: what grows, grows there
_LEAVES = (str, bytes, int, float, bool, complex, Tensor, types.ModuleType, type(None))
_HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
_FOLDERS = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_NO_USERS = tuple({str(path) for each in (*_FOLDERS, Path(__file__).parents[2]) for path in (each, each.resolve())})


def find_holders(
    targets: Mapping[int, object], roots: Mapping[str, object], passes_over: Callable[[object], bool] = lambda _: False
) -> dict[int, str]:
    """Finds paths to objects, the shortest first.

    Args:
        targets: The objects by their ids.
        roots: Where to begin, by the names that people know, such as "model".
        passes_over: Says of an object that what it holds is not to be looked at. Default: of none.

    Returns:
        For the id of each object that was found its path, such as "model.losses[3]".

    Example:
        >>> loss = Tensor()
        >>> find_holders({id(loss): loss}, {"model": types.SimpleNamespace(seen={"last": [loss]})})[id(loss)]
        "model.seen['last'][0]"
    """
    found: dict[int, str] = {}
    for path, child in _walk(roots, passes_over, _MOST_VISITED):
        if id(child) in targets:
            found.setdefault(id(child), path)
            if len(found) == len(targets):
                break
    return found


def find_tensors(roots: Mapping[str, object], passes_over: Callable[[object], bool], most: int) -> list[Tensor]:
    """The tensors that can be reached, parameters left out.

    Args:
        roots: Where to begin; see `find_holders`.
        passes_over: See `find_holders`.
        most: Look at so many objects at the most.
    """
    return [child for _, child in _walk(roots, passes_over, most) if type(child) is Tensor]


def _walk(
    roots: Mapping[str, object], passes_over: Callable[[object], bool], most: int
) -> Iterator[tuple[str, object]]:
    """Everything that can be reached, with its path, breadth first. What does not let itself be looked at is left."""
    seen = {id(root) for root in roots.values()}
    queue = deque((path, root) for path, root in roots.items())
    keep = []  # an object made on the way must not leave its id to another
    while queue and len(seen) < most:
        path, holder = queue.popleft()
        try:
            children = list(_children(path, holder))
        except Exception:  # whatever somebody's object does when it is asked
            continue
        for child_path, child in children:
            yield child_path, child
            if issubclass(type(child), _LEAVES) or id(child) in seen or passes_over(child):
                continue
            seen.add(id(child))
            keep.append(child)
            queue.append((child_path, child))


@lru_cache(maxsize=65536)
def is_of_user(file: str | None) -> bool:
    """Whether a source file is neither of Python, nor of an installed library, nor ours."""
    if not file or file.startswith(("<", *_NO_USERS)):  # thousands of modules, and resolving one asks the disk
        return False
    return not str(Path(file).resolve()).startswith(_NO_USERS)


def globals_of_user() -> dict[str, object]:
    """The global variables of the user's modules, as roots."""
    modules = [module for module in list(sys.modules.values()) if isinstance(module, types.ModuleType)]
    return {module.__name__: module for module in modules if is_of_user(getattr(module, "__file__", None))}


def _children(path: str, holder: Any) -> Iterator[tuple[str, object]]:
    """What an object refers to, with its path."""
    kind = type(holder)  # `isinstance` would ask the object itself, which may be a proxy
    if issubclass(kind, dict | types.MappingProxyType):
        yield from ((f"{path}[{_short(key)}]", holder[key]) for key in _last(holder))
    if issubclass(kind, list | tuple | deque):
        first = max(0, len(holder) - _MOST_ELEMENTS)
        yield from ((f"{path}[{first + index}]", value) for index, value in enumerate(_last(holder)))
    elif issubclass(kind, set | frozenset):
        yield from ((f"an element of {path}", value) for value in islice(holder, _MOST_ELEMENTS))
    elif issubclass(kind, types.FunctionType):
        yield from _of_function(path, holder)
    elif issubclass(kind, types.MethodType):
        yield from ((path, holder.__self__), (path, holder.__func__))
    elif issubclass(kind, types.GeneratorType):
        frame = holder.gi_frame
        yield from ((f"{name!r} in {path}", value) for name, value in list(frame.f_locals.items() if frame else ()))
    elif issubclass(kind, functools.partial):
        yield from ((path, holder.func), (f"{path}.args", holder.args), (f"{path}.keywords", holder.keywords))
    elif issubclass(kind, types.ModuleType):
        yield from ((f"{path}.{name}", value) for name, value in list(vars(holder).items()))
    elif issubclass(kind, type):
        if is_of_user(getattr(sys.modules.get(holder.__module__), "__file__", None)):
            yield from ((f"{holder.__name__}.{name}", value) for name, value in list(vars(holder).items()))
    elif kind.__name__ == "ndarray" and holder.dtype == object:
        elements = holder.reshape(-1)
        first = max(0, len(elements) - _MOST_ELEMENTS)
        yield from ((f"{path}[{first + index}]", value) for index, value in enumerate(elements[first:]))
    else:
        yield from _of_object(path, holder)


def _last(holder: Any) -> list[Any]:
    """The last elements of a sequence, or keys of a dictionary, in order."""
    return list(islice(reversed(holder), _MOST_ELEMENTS))[::-1]


def _of_object(path: str, holder: Any) -> Iterator[tuple[str, object]]:
    attributes = list(vars(holder).items()) if hasattr(holder, "__dict__") else []
    for name in (name for kind in type(holder).__mro__ for name in _slots(kind)):
        try:
            attributes.append((name, getattr(holder, name)))
        except AttributeError:
            continue
    for name, value in attributes:
        if issubclass(type(holder), nn.Module) and name in ("_modules", "_parameters", "_buffers"):
            yield from ((f"{path}.{key}", child) for key, child in list(value.items()))
        elif issubclass(type(holder), nn.Module) and name in _HOOKS:
            yield from ((f"a {_HOOKS[name]} of {path}", hook) for hook in list(value.values()))
        else:
            yield f"{path}.{name}", value
    yield path, type(holder)


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(name for name in slots if not name.startswith("__"))


def _of_function(path: str, function: types.FunctionType) -> Iterator[tuple[str, object]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{name!r} in {function.__qualname__}, {path}", cell.cell_contents
        except ValueError:  # not bound yet
            continue
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield f"a default argument of {function.__qualname__}", value
    yield from ((f"{path}.{name}", value) for name, value in list(vars(function).items()))


def _short(key: object) -> str:
    text = repr(key) if isinstance(key, str | int | float | bool | tuple) else type(key).__name__
    return text if len(text) <= 40 else f"{text[:37]}..."
