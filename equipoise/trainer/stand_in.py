"""Stand-ins for objects that a checkpoint holds and that are not created when it is read.

A stand-in keeps the name of the class and nothing else. It can be kept, copied and written again; every other use is an
error that says how to get the object itself.
"""

from typing import Any, NoReturn

from equipoise.errors import CheckpointError

__all__ = ["StandIn", "class_in_place_of", "stand_ins_in"]

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
    found: dict[str, str] = {}
    seen: set[int] = set()
    waiting = [(path, value)]
    for place, item in waiting:  # the list grows
        if isinstance(item, StandIn):
            found[place] = class_in_place_of(item)
            continue
        if not isinstance(item, dict | list | tuple | set | frozenset) or id(item) in seen:
            continue
        seen.add(id(item))  # a container may hold itself, or one container many times
        children = item.items() if isinstance(item, dict) else enumerate(item)
        waiting += [(f"{place}[{key!r}]", child) for key, child in children]
    return found
