"""Stand-ins for objects of a checkpoint that are not created when it is read.

A stand-in keeps the name of the class and nothing else. It can be kept, copied and written again; every other use is an
error that says how to get the object itself.
"""

import collections
from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn

import numpy

from equipoise.errors import CheckpointError

__all__ = ["StandIn", "class_in_place_of", "stand_ins_in"]

# A file may nest its objects as deeply, and in as many places, as it likes.
_MOST_STAND_INS = 1000
_MOST_KEYS = 20
_LONGEST_KEY = 200

# Operators that Python looks up on the class, so `__getattr__` does not see them.
_CONVERSIONS = ("abs", "bool", "bytes", "complex", "float", "index", "int", "invert", "neg", "pos")
_COMPARISONS = ("ge", "gt", "le", "lt")
_CONTAINER = ("call", "contains", "delitem", "enter", "exit", "getitem", "iter", "len", "next", "setitem")
_ARITHMETIC = ("add", "and", "divmod", "floordiv", "lshift", "matmul", "mod", "mul", "or", "pow", "rshift", "sub")
_REFLECTED = ("radd", "rmatmul", "rmul", "rsub", "rtruediv", "truediv", "xor")
_OPERATORS = (*_CONVERSIONS, *_COMPARISONS, *_CONTAINER, *_ARITHMETIC, *_REFLECTED)


class StandIn:
    """Takes the place of a class, a function or an object that was not created.

    Args:
        module: Name of the module that defines it.
        name: Qualified name in that module.

    Raises:
        CheckpointError: In every use except for keeping, copying, comparing by identity, printing and pickling.

    Example:
        >>> loss = StandIn("torch.nn.modules.loss", "L1Loss")
        >>> loss
        <stand-in for torch.nn.modules.loss.L1Loss>
    """

    __slots__ = ("_module", "_name")

    def __init__(self, module: str, name: str) -> None:
        object.__setattr__(self, "_module", module)
        object.__setattr__(self, "_name", name)

    def __repr__(self) -> str:
        return f"<stand-in for {class_in_place_of(self)}>"

    def __copy__(self) -> "StandIn":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "StandIn":
        return self

    def __reduce__(self) -> Any:
        return StandIn, (self._module, self._name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            # Protocols such as copying look for these, and do without them.
            raise AttributeError(name)
        _refuse(self, f"its attribute `{name}` is read")

    def __setattr__(self, name: str, value: Any) -> None:
        _refuse(self, f"its attribute `{name}` is set")


def class_in_place_of(value: StandIn) -> str:
    """Return the full name of the class that a stand-in replaces, such as "torch.nn.modules.loss.L1Loss"."""
    return f"{value._module}.{value._name}"


def _refuse(value: StandIn, use: str) -> NoReturn:
    name = class_in_place_of(value)
    raise CheckpointError(
        f"The checkpoint holds an object of {name}, which was not created, because creating it could run code; now"
        f" {use}. If you trust the file, pass weights_only=False where you pass ckpt_path; or allow this class by"
        " `torch.serialization.add_safe_globals([...])`."
    )


def _refusing_operator(name: str) -> Any:
    def operator(self: StandIn, *args: Any, **options: Any) -> NoReturn:
        _refuse(self, f"it is used by `{name}`")

    return operator


for _operator in _OPERATORS:
    _method = f"__{_operator}__"
    setattr(StandIn, _method, _refusing_operator(_method))


def stand_ins_in(value: Any, path: str = "") -> dict[str, str]:
    """Return the places of stand-ins in nested containers, with the names of their classes.

    Args:
        value: Dictionaries, lists, tuples, sets and arrays of objects; other objects are not searched.
        path: The place of `value` itself, a prefix of the result's keys. Default: empty.

    Example:
        >>> stand_ins_in({"mine": [1, StandIn("torch.nn", "ReLU")]})
        {"['mine'][1]": 'torch.nn.ReLU'}
    """
    if isinstance(value, StandIn):
        return {path: class_in_place_of(value)}
    class_names: dict[str, str] = {}
    # A container may hold itself, or one container many times.
    visited = {id(value)}
    top = _Container(value, None, None)
    pending = collections.deque([top])
    while pending:
        container = pending.popleft()
        for key, child in _items_of(container.value):
            if isinstance(child, StandIn):
                class_names[path + _place_in(container, key)] = class_in_place_of(child)
                if len(class_names) == _MOST_STAND_INS:
                    return class_names
            elif _is_container(child) and id(child) not in visited:
                visited.add(id(child))
                pending.append(_Container(child, container, key))
    return class_names


class _Container(NamedTuple):
    """A container that is searched.

    Attributes:
        value: The container itself.
        parent: The container that holds it; None: the search began with it.
        key: Its key or index in the parent.
    """

    value: Any
    parent: "_Container | None"
    key: Any


def _is_container(value: Any) -> bool:
    if isinstance(value, dict | list | tuple | set | frozenset):
        return True
    return _is_array_of_objects(value)


def _is_array_of_objects(value: Any) -> bool:
    return isinstance(value, numpy.ndarray) and value.dtype.kind == "O"


def _items_of(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the items of a container with their keys or indices; none for another object."""
    if isinstance(value, dict):
        return value.items()
    if _is_array_of_objects(value):
        return enumerate(value.flat)
    if _is_container(value):
        return enumerate(value)
    return ()


def _place_in(container: _Container, key: Any) -> str:
    """Return the keys that lead to an item; the first of very many are left out."""
    # 1. The keys from the item to the top.
    keys = [key]
    above = container
    while above.parent is not None:
        if len(keys) == _MOST_KEYS:
            keys.append(...)
            break
        keys.append(above.key)
        above = above.parent

    # 2. The same from the top to the item.
    keys.reverse()
    return "".join(f"[{_format_key(item)}]" for item in keys)


def _format_key(key: Any) -> str:
    """Return a key as a program writes it, if that is short for certain."""
    if key is None or key is ...:
        return repr(key)
    if isinstance(key, float):
        return repr(key)
    if isinstance(key, str | bytes):
        if len(key) > _LONGEST_KEY:
            return f"{key[:_LONGEST_KEY]!r}..."
        return repr(key)
    if isinstance(key, int) and key.bit_length() < 64:
        return repr(key)
    return f"a {type(key).__name__}"
