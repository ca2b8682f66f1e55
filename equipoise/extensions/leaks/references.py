"""References that keep an object alive, as a path of names."""

import functools
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
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
# Keys of these classes are written in a path; of others, the class is.
_READABLE_KEYS = (
    str,
    int,
    float,
    bool,
    tuple,
)
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
    folders = []
    for name in ("stdlib", "platstdlib", "purelib", "platlib"):
        folders.append(Path(sysconfig.get_path(name)))
    folders.append(Path(__file__).parents[2])
    # A folder may be reached by a link.
    paths = set()
    for folder in folders:
        resolved = folder.resolve()
        paths.add(str(folder))
        paths.add(str(resolved))
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
        key = id(child)
        if key not in targets:
            continue
        # The first path is the shortest.
        paths.setdefault(key, path)
        if len(paths) == len(targets):
            break
    return paths


def find_tensors(
    roots: Mapping[str, object],
    passes_over: Callable[[object], bool],
    most: int,
) -> list[Tensor]:
    """Find tensors other than parameters.

    Args:
        roots: Objects where the search begins; see `find_holders`.
        passes_over: See `find_holders`.
        most: Maximum number of objects to search.
    """
    tensors = []
    for _, child in _walk(roots, passes_over, most):
        if type(child) is Tensor:
            tensors.append(child)
    return tensors


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
            kind = type(child)
            key = id(child)
            if issubclass(kind, _LEAVES) or key in visited:
                continue
            if passes_over(child):
                continue
            visited.add(key)
            alive.append(child)
            queue.append((child_path, child))


@lru_cache(maxsize=65536)
def is_of_user(file: str | None) -> bool:
    """Return whether a source file belongs neither to Python, nor to an installed library, nor to this package."""
    # Most files end here: there are thousands of modules, and resolving a path reads the disk.
    if not file or file.startswith(("<", *_LIBRARIES)):
        return False
    return not str(Path(file).resolve()).startswith(_LIBRARIES)


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
    first = _first_visited(sequence)
    elements = _last(sequence)
    for index, element in enumerate(elements, start=first):
        yield f"{path}[{index}]", element


def _of_array(path: str, array: Any) -> Iterator[Reference]:
    """Yield the last elements of an array of objects, by their index in the flat array."""
    elements = array.reshape(-1)
    first = _first_visited(elements)
    for index, element in enumerate(elements[first:], start=first):
        yield f"{path}[{index}]", element


def _first_visited(sequence: Any) -> int:
    return max(0, len(sequence) - _MOST_ELEMENTS)


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
    variables = list(frame.f_locals.items())
    for name, value in variables:
        yield f"{name!r} in {path}", value


def _of_namespace(path: str, holder: Any) -> Iterator[Reference]:
    """Yield the variables of a module, a class or a function."""
    namespace = vars(holder)
    # Reading a value may add another one, so the loop runs over a copy.
    for name, value in list(namespace.items()):
        yield f"{path}.{name}", value


def _of_class(kind: type) -> Iterator[Reference]:
    """Yield the attributes of a class, if it is the user's."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if is_of_user(file):
        yield from _of_namespace(kind.__name__, kind)


def _of_object(path: str, holder: Any) -> Iterator[Reference]:
    """Yield the attributes of an object, and its class."""
    kind = type(holder)
    is_module = issubclass(kind, nn.Module)
    for name, value in _attributes(holder):
        if is_module and name in _MEMBERS:
            members = list(value.items())
            for key, child in members:
                yield f"{path}.{key}", child
        elif is_module and name in _HOOKS:
            kind_of_hook = _HOOKS[name]
            for hook in list(value.values()):
                yield f"a {kind_of_hook} of {path}", hook
        else:
            yield f"{path}.{name}", value
    yield path, kind


def _attributes(holder: Any) -> list[tuple[str, Any]]:
    """Return the attributes of an object, those in slots last, without the code by which it may give them out."""
    attributes: list[tuple[str, Any]] = []
    with suppress(AttributeError):
        attributes += object.__getattribute__(holder, "__dict__").items()
    for kind in type(holder).__mro__:
        for name in _slots(kind):
            # A slot may be empty.
            with suppress(AttributeError):
                attributes.append((name, object.__getattribute__(holder, name)))
    return attributes


def _slots(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    if isinstance(slots, str):
        return [slots]
    return [name for name in slots if not name.startswith("__")]


def _of_function(path: str, function: types.FunctionType) -> Iterator[Reference]:
    """Yield the variables that a function encloses, its default arguments and its attributes."""
    name_of_function = function.__qualname__
    # 1. Variables of the functions around it.
    names = function.__code__.co_freevars
    cells = function.__closure__ or ()
    for name, cell in zip(names, cells, strict=True):
        # The variable may have no value yet.
        try:
            value = cell.cell_contents
        except ValueError:
            continue
        yield f"{name!r} in {name_of_function}, {path}", value

    # 2. Default arguments.
    defaults = list(function.__defaults__ or ())
    defaults += (function.__kwdefaults__ or {}).values()
    for value in defaults:
        yield f"a default argument of {name_of_function}", value

    # 3. Attributes.
    yield from _of_namespace(path, function)


def _short(key: object) -> str:
    """Return a dictionary's key for a path: its text, or the name of its class."""
    if not isinstance(key, _READABLE_KEYS):
        return type(key).__name__
    text = repr(key)
    if len(text) <= _LONGEST_KEY:
        return text
    dots = "..."
    return text[: _LONGEST_KEY - len(dots)] + dots
