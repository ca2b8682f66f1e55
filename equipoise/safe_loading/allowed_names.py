"""Names that a checkpoint may use, and the calls that they allow.

A file names classes and functions. Names of data are allowed: containers, numbers, tensors, arrays, paths, OmegaConf's
containers. Those that the user has allowed by `torch.serialization.add_safe_globals` join them. Every other name
becomes a stand-in, whose calls make stand-ins.
"""

import collections
import typing
from argparse import Namespace
from functools import cache
from importlib import import_module
from typing import Any

import numpy
import torch

from equipoise.errors import CheckpointError
from equipoise.safe_loading.arrays import set_numpy_state
from equipoise.safe_loading.constructors import CONSTRUCTORS, VALUES
from equipoise.safe_loading.stand_in import StandIn
from equipoise.safe_loading.tensor_formats import STORAGE_TYPES

__all__ = ["SafeGlobals"]

# Modules from which even the user cannot allow anything, as in torch: nothing in them is data.
_NEVER = ("sys", "os", "posix", "nt")

# Pickles of protocol 2 keep the names of Python 2.
_MODULES_OF_PYTHON_2 = {"__builtin__": "builtins", "copy_reg": "copyreg"}

# Functions that create an object of the class which is their first argument.
_CREATE_FIRST_ARGUMENT = ("<stand-in for copyreg._reconstructor>", "<stand-in for copyreg.__newobj__>")


class SafeGlobals:
    """Finds the objects that the names in a file stand for, and executes the calls that are allowed.

    Example:
        >>> SafeGlobals().find("os", "system")
        <stand-in for os.system>
        >>> SafeGlobals().find("__builtin__", "set")
        <class 'set'>
    """

    def __init__(self) -> None:
        self._user_values = _user_values()

    def find(self, module: str, name: str) -> Any:
        """Return the object that a name stands for, or a stand-in; the name in the file never causes an import."""
        module = _MODULES_OF_PYTHON_2.get(module, module)
        full_name = f"{module}.{name}"
        stand_in = StandIn(module, name)
        if module in _NEVER:
            return stand_in

        for table in (self._user_values, VALUES, _torch_values()):
            if full_name in table:
                return table[full_name]

        # OmegaConf is imported only where a name of it is in question.
        if module.split(".")[0] in ("omegaconf", "typing"):
            return _omegaconf_values().get(full_name, stand_in)
        return stand_in

    def call(self, function: Any, arguments: Any) -> Any:
        """Return the result of a call in the file.

        Raises:
            CheckpointError: If the function may not be called.
        """
        if not isinstance(arguments, tuple):
            raise CheckpointError(f"the arguments of a call are a {type(arguments).__name__}")
        if isinstance(function, StandIn):
            return _stand_in_for_result(function, arguments)
        if _is_one_of(function, self._user_values.values()):
            return function(*arguments)
        constructor = CONSTRUCTORS.get(id(function))
        if constructor is None:
            raise CheckpointError(f"it calls {function!r}, which is not allowed")
        return constructor(*arguments)

    def create(self, kind: Any, arguments: Any, options: dict[str, Any]) -> Any:
        """Return a new object of a class, before its state is set.

        Raises:
            CheckpointError: If the class may not be used in this way.
        """
        if isinstance(kind, StandIn):
            return kind
        if not isinstance(arguments, tuple):
            raise CheckpointError(f"the arguments of a class are a {type(arguments).__name__}")
        if kind is Namespace and not arguments and not options:
            return Namespace()
        if self._is_allowed_class(kind):
            return kind.__new__(kind, *arguments, **options)
        raise CheckpointError(f"it creates an object of {kind!r}, which is not allowed")

    def set_state(self, value: Any, state: Any) -> None:
        """Set the state of an object that the file has created.

        Raises:
            CheckpointError: If the object may have no state.
        """
        kind = type(value)
        if kind is StandIn:
            return
        if kind is collections.OrderedDict:
            _set_metadata(value, state)
        elif kind is Namespace:
            vars(value).update(_checked_attributes(state))
        elif self._is_allowed_class(kind):
            _set_state_of_class(value, state)
        elif isinstance(value, numpy.ndarray | numpy.dtype):
            set_numpy_state(value, state)
        else:
            raise CheckpointError(f"it sets the state of a {kind.__name__}, which is not allowed")

    def _is_allowed_class(self, kind: Any) -> bool:
        if not isinstance(kind, type):
            return False
        if _is_one_of(kind, self._user_values.values()):
            return True
        # OmegaConf is imported only where a class of its own is in question.
        if not kind.__module__.startswith("omegaconf."):
            return False
        return _is_one_of(kind, _omegaconf_values().values())


def _is_one_of(value: Any, candidates: typing.Iterable[Any]) -> bool:
    # Compare identities: an object of the file could define `==`.
    return any(value is candidate for candidate in candidates)


# Tables


def _user_values() -> dict[str, Any]:
    """Return the values allowed by `torch.serialization.add_safe_globals`, by full name."""
    values: dict[str, Any] = {}
    for entry in torch.serialization.get_safe_globals():
        if isinstance(entry, tuple):
            value, name = entry
            values[name] = value
        else:
            values[_full_name(entry)] = entry
    return values


def _full_name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


@cache
def _torch_values() -> dict[str, Any]:
    """Return the dtypes, and the types of storages, which stand for dtypes."""
    values = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    # Storages were defined in each of these modules, one after the other.
    for module in ("torch", "torch.storage", "torch.cuda"):
        for name, dtype in STORAGE_TYPES.items():
            values[f"{module}.{name}"] = dtype
    return values


@cache
def _omegaconf_values() -> dict[str, Any]:
    """Return OmegaConf's containers and their parts; empty if it is not installed."""
    try:
        base = import_module("omegaconf.base")
    except ModuleNotFoundError:
        return {}
    omegaconf = import_module("omegaconf")
    nodes = import_module("omegaconf.nodes")

    classes = [base.ContainerMetadata, base.Metadata]
    classes += [omegaconf.DictConfig, omegaconf.ListConfig]
    for value in vars(nodes).values():
        if isinstance(value, type) and issubclass(value, base.Node):
            classes.append(value)

    values = {_full_name(kind): kind for kind in classes}
    # The metadata of a container names the types of its keys and items.
    for name in ("Any", "Dict", "List"):
        values[f"typing.{name}"] = getattr(typing, name)
    return values


# Calls and states


def _stand_in_for_result(function: StandIn, arguments: tuple[Any, ...]) -> StandIn:
    """Return the stand-in for the result of a call: the class that is created, or else the function."""
    if not arguments:
        return function
    first = arguments[0]
    creates_first = repr(function) in _CREATE_FIRST_ARGUMENT
    if creates_first and isinstance(first, StandIn):
        return first
    return function


def _set_metadata(value: collections.OrderedDict[Any, Any], state: Any) -> None:
    """Set the versions of modules, the one attribute that a state of weights has."""
    metadata = _checked_attributes(state).get("_metadata")
    if metadata is not None:
        vars(value)["_metadata"] = metadata


def _checked_attributes(state: Any) -> dict[str, Any]:
    # A string of a derived class could define `__hash__`, so its type is compared exactly.
    if not isinstance(state, dict) or any(type(key) is not str for key in state):
        raise CheckpointError("the state of an object is no dictionary of names")
    return state


def _set_state_of_class(value: Any, state: Any) -> None:
    """Set the state of an object as pickle does."""
    if hasattr(value, "__setstate__"):
        value.__setstate__(state)
        return
    attributes = state
    slots: Any = {}
    # Pickle writes a pair where the class has `__slots__`.
    if isinstance(state, tuple) and len(state) == 2:
        attributes, slots = state
    attributes = _checked_attributes(attributes or {})
    # An object whose class has `__slots__` alone has no dictionary.
    if attributes:
        vars(value).update(attributes)
    slots = _checked_attributes(slots or {})
    for name, item in slots.items():
        setattr(value, name, item)
