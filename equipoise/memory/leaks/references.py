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

# A path and the object that it leads to.
Reference = tuple[str, object]

_MOST_VISITED = 200_000
# Elements of a container that are visited: the last ones, since a container grows at its end.
_MOST_ELEMENTS = 1000
# Characters of a dictionary's key in a path.
_LONGEST_KEY = 40
# Objects of these classes are not searched.
_LEAVES = (
    str,
    bytes,
    int,
    float,
    bool,
    complex,
    Tensor,
    types.ModuleType,
    type(None),
)
# Dictionaries of a module whose entries count as attributes of the module.
_MEMBERS = ("_modules", "_parameters", "_buffers")
# Dictionaries of a module with hooks.
_HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}


def _library_folders() -> tuple[str, ...]:
    """Return the folders of Python, of installed libraries and of this package."""
    folders = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders.append(Path(__file__).parents[2])
    paths = set()
    for folder in folders:
        paths.add(str(folder))
        paths.add(str(folder.resolve()))
    return tuple(paths)


_LIBRARIES = _library_folders()


def find_holders(
    targets: Mapping[int, object],
    roots: Mapping[str, object],
    passes_over: Callable[[object], bool] = lambda _: False,
) -> dict[int, str]:
    """Find paths to objects, breadth first, so that the paths are short.

    Args:
        targets: The objects by their ids.
        roots: Objects where the search begins, by names that users know, such as "model".
        passes_over: Returns True for an object whose references are not to be searched. Default: for none.

    Returns:
        Paths by the ids of the objects, such as "model.losses[3]". Objects without a path are left out.

    Example:
        >>> loss = Tensor()
        >>> find_holders({id(loss): loss}, {"model": types.SimpleNamespace(seen={"last": [loss]})})[id(loss)]
        "model.seen['last'][0]"
    """
    paths: dict[int, str] = {}
    for path, child in _walk(roots, passes_over, _MOST_VISITED):
        if id(child) in targets:
            paths.setdefault(id(child), path)
            if len(paths) == len(targets):
                break
    return paths


def find_tensors(roots: Mapping[str, object], passes_over: Callable[[object], bool], most: int) -> list[Tensor]:
    """Find tensors other than parameters.

    Args:
        roots: Objects where the search begins; see `find_holders`.
        passes_over: See `find_holders`.
        most: Maximum number of objects to search.
    """
    return [child for _, child in _walk(roots, passes_over, most) if type(child) is Tensor]


def _walk(
    roots: Mapping[str, object],
    passes_over: Callable[[object], bool],
    most: int,
) -> Iterator[Reference]:
    """Yield all references from the roots on, breadth first. Objects that fail to list their references are skipped."""
    visited = {id(root) for root in roots.values()}
    queue = deque(roots.items())
    # An object that exists only for this search, such as a bound method, must not leave its id to another one.
    alive = []
    while queue and len(visited) < most:
        path, holder = queue.popleft()
        # Attributes of a user's object may run any code.
        try:
            references = list(_references(path, holder))
        except Exception:
            continue
        for child_path, child in references:
            yield child_path, child
            if issubclass(type(child), _LEAVES) or id(child) in visited or passes_over(child):
                continue
            visited.add(id(child))
            alive.append(child)
            queue.append((child_path, child))


@lru_cache(maxsize=65536)
def is_of_user(file: str | None) -> bool:
    """Return whether a source file belongs neither to Python, nor to an installed library, nor to this package."""
    # Most files end here: there are thousands of modules, and resolving a path reads the disk.
    if not file or file.startswith(("<", *_LIBRARIES)):
        return False
    resolved = str(Path(file).resolve())
    return not resolved.startswith(_LIBRARIES)


def globals_of_user() -> dict[str, object]:
    """Return the user's modules by name, as roots for their global variables."""
    modules: dict[str, object] = {}
    for module in list(sys.modules.values()):
        # Some libraries put other objects there.
        is_module = isinstance(module, types.ModuleType)
        if is_module and is_of_user(getattr(module, "__file__", None)):
            modules[module.__name__] = module
    return modules


def _references(path: str, holder: Any) -> Iterator[Reference]:
    """Yield the objects to which an object refers, with their paths."""
    # `isinstance` would read `__class__` of the object, which may be a proxy.
    kind = type(holder)
    # A subclass of a dictionary counts as an object too: it may have attributes.
    if issubclass(kind, dict | types.MappingProxyType):
        yield from _of_mapping(path, holder)
    if issubclass(kind, list | tuple | deque):
        yield from _of_sequence(path, holder)
    elif issubclass(kind, set | frozenset):
        for element in islice(holder, _MOST_ELEMENTS):
            yield f"an element of {path}", element
    elif issubclass(kind, types.FunctionType):
        yield from _of_function(path, holder)
    elif issubclass(kind, types.MethodType):
        yield path, holder.__self__
        yield path, holder.__func__
    elif issubclass(kind, types.GeneratorType):
        yield from _of_generator(path, holder)
    elif issubclass(kind, functools.partial):
        yield path, holder.func
        yield f"{path}.args", holder.args
        yield f"{path}.keywords", holder.keywords
    elif issubclass(kind, types.ModuleType):
        yield from _of_namespace(path, holder)
    elif issubclass(kind, type):
        yield from _of_class(holder)
    elif kind.__name__ == "ndarray" and holder.dtype == object:
        yield from _of_array(path, holder)
    else:
        yield from _of_object(path, holder)


def _of_mapping(path: str, mapping: Any) -> Iterator[Reference]:
    for key in _last(mapping):
        yield f"{path}[{_short(key)}]", mapping[key]


def _of_sequence(path: str, sequence: Any) -> Iterator[Reference]:
    first = max(0, len(sequence) - _MOST_ELEMENTS)
    for index, element in enumerate(_last(sequence), start=first):
        yield f"{path}[{index}]", element


def _of_array(path: str, array: Any) -> Iterator[Reference]:
    """Yield the last elements of an array of objects, by their index in the flat array."""
    elements = array.reshape(-1)
    first = max(0, len(elements) - _MOST_ELEMENTS)
    for index, element in enumerate(elements[first:], start=first):
        yield f"{path}[{index}]", element


def _last(holder: Any) -> list[Any]:
    """Return the last elements of a sequence, or keys of a dictionary, in their order."""
    elements = list(islice(reversed(holder), _MOST_ELEMENTS))
    elements.reverse()
    return elements


def _of_generator(path: str, generator: Any) -> Iterator[Reference]:
    frame = generator.gi_frame
    # A generator that has ended has no frame.
    if frame is None:
        return
    for name, value in list(frame.f_locals.items()):
        yield f"{name!r} in {path}", value


def _of_namespace(path: str, holder: Any) -> Iterator[Reference]:
    """Yield the variables of a module, a class or a function."""
    # Reading a value may add another one, so the loop runs over a copy.
    for name, value in list(vars(holder).items()):
        yield f"{path}.{name}", value


def _of_class(kind: type) -> Iterator[Reference]:
    """Yield the attributes of a class, if it is the user's."""
    module = sys.modules.get(kind.__module__)
    if is_of_user(getattr(module, "__file__", None)):
        yield from _of_namespace(kind.__name__, kind)


def _of_object(path: str, holder: Any) -> Iterator[Reference]:
    """Yield the attributes of an object, and its class."""
    is_module = issubclass(type(holder), nn.Module)
    for name, value in _attributes(holder):
        if is_module and name in _MEMBERS:
            for key, child in list(value.items()):
                yield f"{path}.{key}", child
        elif is_module and name in _HOOKS:
            for hook in list(value.values()):
                yield f"a {_HOOKS[name]} of {path}", hook
        else:
            yield f"{path}.{name}", value
    yield path, type(holder)


def _attributes(holder: Any) -> list[tuple[str, Any]]:
    """Return the attributes of an object, those in slots last."""
    attributes: list[tuple[str, Any]] = []
    if hasattr(holder, "__dict__"):
        attributes += vars(holder).items()
    for kind in type(holder).__mro__:
        for name in _slots(kind):
            # A slot may be empty.
            try:
                attributes.append((name, getattr(holder, name)))
            except AttributeError:
                continue
    return attributes


def _slots(kind: type) -> list[str]:
    """Return the names of a class's own slots."""
    slots = vars(kind).get("__slots__", ())
    if isinstance(slots, str):
        return [slots]
    return [name for name in slots if not name.startswith("__")]


def _of_function(path: str, function: types.FunctionType) -> Iterator[Reference]:
    """Yield the variables that a function encloses, its default arguments and its attributes."""
    name_of_function = function.__qualname__
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        # The variable may have no value yet.
        try:
            yield f"{name!r} in {name_of_function}, {path}", cell.cell_contents
        except ValueError:
            continue
    defaults = list(function.__defaults__ or ())
    defaults += (function.__kwdefaults__ or {}).values()
    for value in defaults:
        yield f"a default argument of {name_of_function}", value
    yield from _of_namespace(path, function)


def _short(key: object) -> str:
    """Return a dictionary's key for a path: its text, or the name of its class."""
    if not isinstance(key, str | int | float | bool | tuple):
        return type(key).__name__
    text = repr(key)
    if len(text) > _LONGEST_KEY:
        return f"{text[: _LONGEST_KEY - 3]}..."
    return text
