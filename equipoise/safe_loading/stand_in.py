"""Stand-ins for objects of a checkpoint that are not created when it is read.

A stand-in keeps the name of the class and nothing else. It can be kept, copied and written again; every other use is an
error that says how to get the object itself.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn

from equipoise.errors import CheckpointError

__all__ = ["StandIn", "class_in_place_of", "stand_ins_in"]

# A file may nest its objects as deeply, and in as many places, as it likes.
_MOST_FOUND = 1000
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
            raise AttributeError(name)  # protocols ask for these, and cope without
        _refuse(self, f"its attribute `{name}` is read")

    def __setattr__(self, name: str, value: Any) -> None:
        _refuse(self, f"its attribute `{name}` is set")


def class_in_place_of(value: StandIn) -> str:
    """Return the full name of what a stand-in takes the place of, such as "torch.nn.modules.loss.L1Loss"."""
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
    setattr(StandIn, f"__{_operator}__", _refusing_operator(f"__{_operator}__"))


def stand_ins_in(value: Any, path: str = "") -> dict[str, str]:
    """Return where in nested containers stand-ins are, with the names of their classes.

    Args:
        value: Dictionaries, lists and tuples; other objects are not searched.
        path: Where `value` itself is. Default: at the top.

    Example:
        >>> stand_ins_in({"mine": [1, StandIn("torch.nn", "ReLU")]})
        {"['mine'][1]": 'torch.nn.ReLU'}
    """
    if isinstance(value, StandIn):
        return {path: class_in_place_of(value)}
    found: dict[str, str] = {}
    seen = {id(value)}  # a container may hold itself, or one container many times
    containers = [_Container(value, None, None)]
    for container in containers:  # the list grows
        for key, child in _items_of(container.value):
            if isinstance(child, StandIn):
                found[path + _place_in(container, key)] = class_in_place_of(child)
                if len(found) == _MOST_FOUND:
                    return found
            elif _is_container(child) and id(child) not in seen:
                seen.add(id(child))
                containers.append(_Container(child, container, key))
    return found


class _Container(NamedTuple):
    """A container that is searched.

    Attributes:
        value: It.
        parent: The one that holds it; None: the whole.
        key: Where it is in there.
    """

    value: Any
    parent: "_Container | None"
    key: Any


def _is_container(value: Any) -> bool:
    return isinstance(value, dict | list | tuple | set | frozenset) or _is_array_of_objects(value)


def _is_array_of_objects(value: Any) -> bool:
    return type(value).__module__ == "numpy" and getattr(getattr(value, "dtype", None), "kind", None) == "O"


def _items_of(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict):
        return value.items()
    if _is_array_of_objects(value):
        return enumerate(value.flat)
    return enumerate(value) if _is_container(value) else ()


def _place_in(container: _Container, key: Any) -> str:
    """Return the keys that lead to an item, without the first of very many."""
    keys = [key]
    above: _Container | None = container
    while above is not None and above.parent is not None:
        if len(keys) == _MOST_KEYS:
            keys.append(...)
            break
        keys.append(above.key)
        above = above.parent
    return "".join(f"[{_shown(each)}]" for each in reversed(keys))


def _shown(key: Any) -> str:
    """Return a key as a program writes it, if that is short for certain."""
    if isinstance(key, str | bytes) and len(key) > _LONGEST_KEY:
        return f"{key[:_LONGEST_KEY]!r}..."
    simple = key is None or key is ... or isinstance(key, str | bytes | float)
    if simple or (isinstance(key, int) and key.bit_length() < 64):
        return repr(key)
    return f"a {type(key).__name__}"
