"""Who keeps an object: a path of names to it, from objects that people know by name."""

import functools
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

__all__ = ["find_holders", "globals_of_user", "is_of_user"]

_MOST_VISITED = 200_000
_LEAVES = (str, bytes, int, float, bool, complex, Tensor, types.ModuleType, type(None))
_HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
_LIBRARIES = tuple(
    str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_OWN = str(Path(__file__).resolve().parents[1])


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
    seen = {id(root) for root in roots.values()}
    queue = deque((path, root) for path, root in roots.items())
    keep = []  # an object made on the way must not leave its id to another
    while queue and len(found) < len(targets) and len(seen) < _MOST_VISITED:
        path, holder = queue.popleft()
        for child_path, child in _children(path, holder):
            if id(child) in targets:
                found.setdefault(id(child), child_path)
            if isinstance(child, _LEAVES) or id(child) in seen or passes_over(child):
                continue
            seen.add(id(child))
            keep.append(child)
            queue.append((child_path, child))
    return found


def is_of_user(file: str | None) -> bool:
    """Whether a source file is neither of Python, nor of an installed library, nor ours."""
    if not file or file.startswith("<"):
        return False
    resolved = str(Path(file).resolve())
    return not resolved.startswith(_LIBRARIES) and not resolved.startswith(_OWN)


def globals_of_user() -> dict[str, object]:
    """The global variables of the user's modules, as roots."""
    modules = [module for module in list(sys.modules.values()) if isinstance(module, types.ModuleType)]
    return {f"module {module.__name__}": module for module in modules if is_of_user(getattr(module, "__file__", None))}


def _children(path: str, holder: Any) -> Iterator[tuple[str, object]]:
    """What an object refers to, with its path."""
    if isinstance(holder, Mapping):
        yield from ((f"{path}[{_short(key)}]", value) for key, value in list(holder.items()))
    if isinstance(holder, list | tuple | deque):
        yield from ((f"{path}[{index}]", value) for index, value in enumerate(list(holder)))
    elif isinstance(holder, set | frozenset):
        yield from ((f"an element of {path}", value) for value in list(holder))
    elif isinstance(holder, types.FunctionType):
        yield from _of_function(path, holder)
    elif isinstance(holder, types.MethodType):
        yield from ((path, holder.__self__), (path, holder.__func__))
    elif isinstance(holder, functools.partial):
        yield from ((path, holder.func), (f"{path}.args", holder.args), (f"{path}.keywords", holder.keywords))
    elif isinstance(holder, types.ModuleType):
        yield from ((f"{name!r} of {path}", value) for name, value in list(vars(holder).items()))
    elif isinstance(holder, type):
        if is_of_user(getattr(sys.modules.get(holder.__module__), "__file__", None)):
            yield from ((f"{holder.__name__}.{name}", value) for name, value in list(vars(holder).items()))
    else:
        yield from _of_object(path, holder)


def _of_object(path: str, holder: Any) -> Iterator[tuple[str, object]]:
    attributes = list(vars(holder).items()) if hasattr(holder, "__dict__") else []
    for name in (name for kind in type(holder).__mro__ for name in _slots(kind)):
        try:
            attributes.append((name, getattr(holder, name)))
        except AttributeError:
            continue
    for name, value in attributes:
        if isinstance(holder, nn.Module) and name in ("_modules", "_parameters", "_buffers"):
            yield from ((f"{path}.{key}", child) for key, child in list(value.items()))
        elif isinstance(holder, nn.Module) and name in _HOOKS:
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
