"""Unpickler that runs nothing of what it reads.

A pickle is a program for a small stack machine. This one carries out the instructions that build plain data. Where an
instruction would call something else, it puts a stand-in for the result.
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
    """Return the object that a pickle describes, with stand-ins for whatever is not plain data.

    Args:
        file: Where it begins; afterwards the position is behind its end.
        load_storage: Returns the storage that an identifier in the pickle names. None: it may name none.

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
    """The stack, the memory and the instructions."""

    def __init__(self, load_storage: Callable[[Any], Any] | None) -> None:
        self.load_storage = load_storage
        self.globals = SafeGlobals()
        self.stack: list[Any] = []
        self.stacks_below: list[list[Any]] = []  # one for each mark
        self.memo: dict[int, Any] = {}

    def execute(self, name: str, argument: Any) -> None:
        """Carry out one instruction."""
        if name in _PUSHES_ITS_ARGUMENT:
            self.stack.append(argument)
        elif name in _MAKES:
            self.stack.append(_MAKES[name]())
        elif name in _READS_MEMO:
            self.stack.append(self.memo[argument])
        elif name in _WRITES_MEMO:
            self.memo[len(self.memo) if argument is None else argument] = self.stack[-1]
        elif name in _INSTRUCTIONS:
            _INSTRUCTIONS[name](self, argument)
        elif name not in _WITHOUT_EFFECT:
            raise CheckpointError(f"it holds the instruction {name}, which is not allowed")

    def result(self) -> Any:
        """Return what is left on the stack at the end."""
        return self.stack.pop()

    # The stack

    def mark(self, argument: Any) -> None:
        """Remember where the items of a container begin."""
        self.stacks_below.append(self.stack)
        self.stack = []

    def above_mark(self) -> list[Any]:
        """Return the items since the last mark and forget it."""
        items = self.stack
        self.stack = self.stacks_below.pop()
        return items

    def pop(self, argument: Any) -> None:
        """Forget the topmost item, or the mark."""
        if self.stack:
            self.stack.pop()
        else:
            self.above_mark()

    def pop_mark(self, argument: Any) -> None:
        """Forget everything since the mark."""
        self.above_mark()

    def duplicate(self, argument: Any) -> None:
        """Repeat the topmost item."""
        self.stack.append(self.stack[-1])

    # Containers

    def tuple_of(self, count: int) -> None:
        """Make a tuple of the topmost items."""
        items = tuple(self.stack[-count:])
        if len(items) < count:
            raise CheckpointError("a tuple lacks items")
        del self.stack[-count:]
        self.stack.append(items)

    def make_tuple(self, argument: Any) -> None:
        """Make a tuple of what is above the mark."""
        items = tuple(self.above_mark())
        self.stack.append(items)

    def make_list(self, argument: Any) -> None:
        """Make a list of what is above the mark."""
        items = self.above_mark()
        self.stack.append(items)

    def make_dict(self, argument: Any) -> None:
        """Make a dictionary of what is above the mark."""
        items = self.above_mark()
        self.stack.append({})
        self._set_items(items)

    def make_frozenset(self, argument: Any) -> None:
        """Make a frozen set of what is above the mark."""
        items = self.above_mark()
        for item in items:
            check_key(item)
        self.stack.append(frozenset(items))

    def append(self, argument: Any) -> None:
        """Append one item to a list."""
        item = self.stack.pop()
        self._extend([item])

    def append_all(self, argument: Any) -> None:
        """Append what is above the mark to a list."""
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
        """Set what is above the mark in a dictionary."""
        self._set_items(self.above_mark())

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is StandIn:
            return
        if type(target) not in (dict, collections.OrderedDict, collections.Counter, collections.defaultdict):
            raise CheckpointError(f"it sets items of a {type(target).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            check_key(key)
            target[key] = value

    def add_all(self, argument: Any) -> None:
        """Add what is above the mark to a set."""
        items = self.above_mark()
        target = self.stack[-1]
        if type(target) is not set:
            raise CheckpointError(f"it adds items to a {type(target).__name__}")
        for item in items:
            check_key(item)
            target.add(item)

    # Names, calls, objects

    def find_global(self, argument: str) -> None:
        """Put what a name stands for."""
        module, name = argument.split(" ", 1)
        self.stack.append(self.globals.find(module, name))

    def find_stacked_global(self, argument: Any) -> None:
        """Put what a name on the stack stands for."""
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

    def call_named(self, argument: str) -> None:
        """Call what a name stands for with what is above the mark."""
        arguments = tuple(self.above_mark())
        module, name = argument.split(" ", 1)
        self.stack.append(self.globals.call(self.globals.find(module, name), arguments))

    def call_first(self, argument: Any) -> None:
        """Call the first item above the mark with the others."""
        function, *arguments = self.above_mark()
        self.stack.append(self.globals.call(function, tuple(arguments)))

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
        """Put the storage that the topmost item names."""
        identifier = self.stack.pop()
        if self.load_storage is None:
            raise CheckpointError("it refers to a storage where there is none")
        self.stack.append(self.load_storage(identifier))


_NUMBERS = ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT")
_TEXTS = ("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")
_BYTES = ("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8")
_PUSHES_ITS_ARGUMENT = frozenset((*_NUMBERS, *_TEXTS, *_BYTES))
_READS_MEMO = frozenset(("GET", "BINGET", "LONG_BINGET"))
_WRITES_MEMO = frozenset(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"))
_WITHOUT_EFFECT = frozenset(("PROTO", "FRAME", "STOP"))
_MAKES: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
}
_INSTRUCTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": _Machine.mark,
    "POP": _Machine.pop,
    "POP_MARK": _Machine.pop_mark,
    "DUP": _Machine.duplicate,
    "TUPLE1": lambda machine, argument: machine.tuple_of(1),
    "TUPLE2": lambda machine, argument: machine.tuple_of(2),
    "TUPLE3": lambda machine, argument: machine.tuple_of(3),
    "TUPLE": _Machine.make_tuple,
    "LIST": _Machine.make_list,
    "DICT": _Machine.make_dict,
    "FROZENSET": _Machine.make_frozenset,
    "APPEND": _Machine.append,
    "APPENDS": _Machine.append_all,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_all_items,
    "ADDITEMS": _Machine.add_all,
    "GLOBAL": _Machine.find_global,
    "STACK_GLOBAL": _Machine.find_stacked_global,
    "REDUCE": _Machine.call,
    "INST": _Machine.call_named,
    "OBJ": _Machine.call_first,
    "NEWOBJ": _Machine.create,
    "NEWOBJ_EX": _Machine.create_with_options,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.find_storage,
}
