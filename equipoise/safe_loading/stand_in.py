"""Stand-ins for objects of a checkpoint that are not created when it is read.

A stand-in keeps the name of the class and nothing else. It can be kept, copied and written again; every other use is an
error that says how to get the object itself.
"""

from typing import Any, NoReturn

from equipoise.errors import CheckpointError

__all__ = ["StandIn", "class_in_place_of"]

# Operators that Python looks up on the class, so `__getattr__` does not see them.
_CONVERSIONS = ("abs", "bool", "bytes", "complex", "float", "index", "int", "invert", "neg", "pos", "round", "trunc")
_COMPARISONS = ("ge", "gt", "le", "lt")
_CONTAINER = ("contains", "delitem", "getitem", "iter", "len", "next", "setitem")
_BINARY = (
    *("add", "and", "divmod", "floordiv", "lshift", "matmul", "mod"),
    *("mul", "or", "pow", "rshift", "sub", "truediv", "xor"),
)
# With the stand-in on the right.
_REFLECTED = tuple(f"r{name}" for name in _BINARY)
# `s()`, `with s`, and `isinstance` and `issubclass` with a stand-in as the class.
_OTHER = ("call", "enter", "exit", "instancecheck", "subclasscheck")
_OPERATORS = (*_CONVERSIONS, *_COMPARISONS, *_CONTAINER, *_BINARY, *_REFLECTED, *_OTHER)


def _refusing_operators(cls: type["StandIn"]) -> type["StandIn"]:
    """Give a class all operators above, each of which raises an error."""
    for name in _OPERATORS:
        method = f"__{name}__"
        setattr(cls, method, _refusing(method))
    return cls


def _refusing(method: str) -> Any:
    def operator(self: "StandIn", *args: Any, **options: Any) -> NoReturn:
        _refuse(self, f"it is used by `{method}`")

    return operator


@_refusing_operators
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
        if name.startswith("__"):
            # Protocols such as copying look for these, and do without them.
            raise AttributeError(name)
        _refuse(self, f"its attribute `{name}` is read")

    def __setattr__(self, name: str, value: Any) -> None:
        _refuse(self, f"its attribute `{name}` is set")

    def __delattr__(self, name: str) -> None:
        _refuse(self, f"its attribute `{name}` is deleted")


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
