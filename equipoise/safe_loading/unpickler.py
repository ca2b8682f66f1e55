"""Unpickler that runs no code of the pickle.

A pickle is a program for a small stack machine. This one executes the instructions that build plain data, of protocol 2
and later ones. If an instruction would call another function, it pushes a stand-in for the result.
"""

import collections
import pickletools
from collections.abc import Callable
from typing import IO, Any

from equipoise.errors import CheckpointError
from equipoise.safe_loading.allowed_names import SafeGlobals
from equipoise.safe_loading.constructors import check_key
from equipoise.safe_loading.stand_in import StandIn

__all__ = ["load_pickle"]


def load_pickle(file: IO[bytes], load_storage: Callable[[Any], Any] | None = None) -> Any:
    """Return the object that a pickle describes, with stand-ins for everything that is not plain data.

    Args:
        file: The file, at the beginning of the pickle; afterwards its position is after the end of the pickle.
        load_storage: Returns the storage that an identifier in the pickle names. None: the pickle may name none.

    Raises:
        CheckpointError: If an instruction is damaged or not allowed. Damage may raise other errors as well.

    Example:
        >>> import io, pickle
        >>> load_pickle(io.BytesIO(pickle.dumps({"loss": print, "steps": 3})))
        {'loss': <stand-in for builtins.print>, 'steps': 3}
    """
    machine = _Machine(load_storage)
    for opcode, argument, _ in pickletools.genops(file):
        machine.execute(opcode.name, argument)
    return machine.result()


class _Machine:
    """The stack, the memory and the instructions.

    Every instruction is a method with one argument, which many of them do not need.
    """

    def __init__(self, load_storage: Callable[[Any], Any] | None) -> None:
        self.load_storage = load_storage
        self.globals = SafeGlobals()
        self.stack: list[Any] = []
        # One for each mark.
        self.stacks_below: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def execute(self, name: str, argument: Any) -> None:
        """Carry out one instruction."""
        if name in _PUSHES_ITS_ARGUMENT:
            self.stack.append(argument)
        elif name in _PUSHES_NEW_VALUE:
            self.stack.append(_PUSHES_NEW_VALUE[name]())
        elif name in _READS_MEMO:
            self.stack.append(self.memo[argument])
        elif name in _WRITES_MEMO:
            self._memorize(argument)
        elif name in _INSTRUCTIONS:
            _INSTRUCTIONS[name](self, argument)
        elif name not in _WITHOUT_EFFECT:
            raise CheckpointError(f"it holds the instruction {name}, which is not allowed")

    def result(self) -> Any:
        """Return the object that the pickle describes, after the last instruction."""
        return self.stack.pop()

    def _memorize(self, index: int | None) -> None:
        # MEMOIZE has no argument and means the next index.
        if index is None:
            index = len(self.memo)
        self.memo[index] = self.stack[-1]

    # The stack

    def mark(self, argument: Any) -> None:
        """Remember where the items of a container begin."""
        self.stacks_below.append(self.stack)
        self.stack = []

    def above_mark(self) -> list[Any]:
        """Return the items since the last mark and remove the mark."""
        items = self.stack
        self.stack = self.stacks_below.pop()
        return items

    def pop(self, argument: Any) -> None:
        """Remove the topmost item, or the mark."""
        if self.stack:
            self.stack.pop()
        else:
            self.above_mark()

    def pop_mark(self, argument: Any) -> None:
        """Remove everything since the mark."""
        self.above_mark()

    # Containers

    def tuple_of(self, count: int) -> None:
        """Make a tuple of the topmost items."""
        items = tuple(self.stack[-count:])
        if len(items) < count:
            raise CheckpointError("a tuple lacks items")
        del self.stack[-count:]
        self.stack.append(items)

    def make_tuple(self, argument: Any) -> None:
        """Make a tuple of the items above the mark."""
        items = tuple(self.above_mark())
        self.stack.append(items)

    def make_frozenset(self, argument: Any) -> None:
        """Make a frozen set of the items above the mark."""
        items = self.above_mark()
        for item in items:
            check_key(item)
        self.stack.append(frozenset(items))

    def append(self, argument: Any) -> None:
        """Append one item to a list."""
        self._extend([self.stack.pop()])

    def append_all(self, argument: Any) -> None:
        """Append the items above the mark to a list."""
        self._extend(self.above_mark())

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) in (list, collections.deque):
            target.extend(items)
        elif type(target) is not StandIn:
            raise CheckpointError(f"it appends to a {type(target).__name__}")

    def set_item(self, argument: Any) -> None:
        """Set one item of a dictionary."""
        value = self.stack.pop()
        key = self.stack.pop()
        self._set_items([key, value])

    def set_all_items(self, argument: Any) -> None:
        """Set the items above the mark in a dictionary."""
        self._set_items(self.above_mark())

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        kind = type(target)
        if kind is StandIn:
            return
        if kind not in _DICTIONARIES:
            raise CheckpointError(f"it sets items of a {kind.__name__}")
        keys = items[::2]
        values = items[1::2]
        for key, value in zip(keys, values, strict=True):
            check_key(key)
            target[key] = value

    def add_all(self, argument: Any) -> None:
        """Add the items above the mark to a set."""
        items = self.above_mark()
        target = self.stack[-1]
        if type(target) is not set:
            raise CheckpointError(f"it adds items to a {type(target).__name__}")
        for item in items:
            check_key(item)
            target.add(item)

    # Names, calls, objects

    def find_global(self, argument: str) -> None:
        """Push the object that a name stands for."""
        module, name = argument.split(" ", 1)
        self.stack.append(self.globals.find(module, name))

    def find_stacked_global(self, argument: Any) -> None:
        """Push the object that a name on the stack stands for."""
        name = self.stack.pop()
        module = self.stack.pop()
        if type(module) is not str or type(name) is not str:
            raise CheckpointError("the name of a class is no string")
        self.stack.append(self.globals.find(module, name))

    def call(self, argument: Any) -> None:
        """Call a function, if that is allowed."""
        arguments = self.stack.pop()
        function = self.stack.pop()
        self.stack.append(self.globals.call(function, arguments))

    def create(self, argument: Any) -> None:
        """Create an object of a class."""
        arguments = self.stack.pop()
        kind = self.stack.pop()
        self.stack.append(self.globals.create(kind, arguments, {}))

    def create_with_options(self, argument: Any) -> None:
        """Create an object of a class with keyword arguments."""
        options = self.stack.pop()
        arguments = self.stack.pop()
        kind = self.stack.pop()
        self.stack.append(self.globals.create(kind, arguments, options))

    def build(self, argument: Any) -> None:
        """Set the state of the topmost object."""
        state = self.stack.pop()
        self.globals.set_state(self.stack[-1], state)

    def find_storage(self, argument: Any) -> None:
        """Push the storage that the topmost item names."""
        identifier = self.stack.pop()
        if self.load_storage is None:
            raise CheckpointError("it refers to a storage where there is none")
        self.stack.append(self.load_storage(identifier))


# Classes whose items a pickle may set.
_DICTIONARIES: tuple[type[Any], ...] = (dict, collections.OrderedDict, collections.Counter, collections.defaultdict)

# Names of instructions, as `pickletools` writes them.
_NUMBERS = ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT")
_TEXTS = ("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")
_BYTES = ("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8")
_PUSHES_ITS_ARGUMENT = frozenset((*_NUMBERS, *_TEXTS, *_BYTES))
_READS_MEMO = frozenset(("GET", "BINGET", "LONG_BINGET"))
_WRITES_MEMO = frozenset(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"))
_WITHOUT_EFFECT = frozenset(("PROTO", "FRAME", "STOP"))

# Instructions that push a new value.
_PUSHES_NEW_VALUE: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
}

# All other instructions that are allowed.
_INSTRUCTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": _Machine.mark,
    "POP": _Machine.pop,
    "POP_MARK": _Machine.pop_mark,
    "TUPLE1": lambda machine, argument: machine.tuple_of(1),
    "TUPLE2": lambda machine, argument: machine.tuple_of(2),
    "TUPLE3": lambda machine, argument: machine.tuple_of(3),
    "TUPLE": _Machine.make_tuple,
    "FROZENSET": _Machine.make_frozenset,
    "APPEND": _Machine.append,
    "APPENDS": _Machine.append_all,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_all_items,
    "ADDITEMS": _Machine.add_all,
    "GLOBAL": _Machine.find_global,
    "STACK_GLOBAL": _Machine.find_stacked_global,
    "REDUCE": _Machine.call,
    "NEWOBJ": _Machine.create,
    "NEWOBJ_EX": _Machine.create_with_options,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.find_storage,
}
