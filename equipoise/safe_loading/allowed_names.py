"""Names that a checkpoint may use, and what each of them may do.

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

import torch

from equipoise.errors import CheckpointError
from equipoise.safe_loading.arrays import numpy_constructors, numpy_values, set_numpy_state
from equipoise.safe_loading.constructors import CONSTRUCTORS, VALUES
from equipoise.safe_loading.stand_in import StandIn
from equipoise.safe_loading.tensor_formats import STORAGE_TYPES

__all__ = ["SafeGlobals"]

# Modules from which even the user cannot allow anything, as in torch: nothing in them is data.
_NEVER = ("sys", "os", "posix", "nt")

# Pickles of protocol 2 keep the names of Python 2.
_MODULES_OF_PYTHON_2 = {"__builtin__": "builtins", "copy_reg": "copyreg"}


class SafeGlobals:
    """Finds what the names in a file stand for, and carries out the calls that are allowed.

    Example:
        >>> SafeGlobals().find("os", "system")
        <stand-in for os.system>
        >>> SafeGlobals().find("__builtin__", "set")
        <class 'set'>
    """

    def __init__(self) -> None:
        self._of_the_user = _allowed_by_the_user()

    def find(self, module: str, name: str) -> Any:
        """Return the object that a name stands for, or a stand-in; nothing is imported because a file names it."""
        module = _MODULES_OF_PYTHON_2.get(module, module)
        full = f"{module}.{name}"
        if module in _NEVER:
            return StandIn(module, name)
        for table in (self._of_the_user, VALUES, _of_torch()):
            if full in table:
                return table[full]
        package = module.split(".")[0]
        if package in ("omegaconf", "typing"):
            return _of_omegaconf().get(full, StandIn(module, name))
        if package == "numpy":
            return numpy_values().get(full, StandIn(module, name))
        return StandIn(module, name)

    def call(self, function: Any, arguments: Any) -> Any:
        """Return what a call in the file makes.

        Raises:
            CheckpointError: If the function may not be called.
        """
        if not isinstance(arguments, tuple):
            raise CheckpointError(f"the arguments of a call are a {type(arguments).__name__}")
        if isinstance(function, StandIn):
            return _stand_in_for_result(function, arguments)
        if _is_one_of(function, self._of_the_user.values()):
            return function(*arguments)
        constructor = CONSTRUCTORS.get(id(function)) or numpy_constructors().get(id(function))
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
            vars(value).update(_names_only(state))
        elif self._is_allowed_class(kind):
            _set_state_of_class(value, state)
        elif _is_of_numpy(value):
            set_numpy_state(value, state)
        else:
            raise CheckpointError(f"it sets the state of a {kind.__name__}, which is not allowed")

    def _is_allowed_class(self, kind: Any) -> bool:
        if not isinstance(kind, type):
            return False
        if _is_one_of(kind, self._of_the_user.values()):
            return True
        return kind.__module__.startswith("omegaconf.") and _is_one_of(kind, _of_omegaconf().values())


def _is_one_of(value: Any, known: typing.Iterable[Any]) -> bool:
    return any(value is one for one in known)


# Tables


def _allowed_by_the_user() -> dict[str, Any]:
    """Return what `torch.serialization.add_safe_globals` has allowed, by full name."""
    allowed: dict[str, Any] = {}
    for entry in torch.serialization.get_safe_globals():
        if isinstance(entry, tuple):
            value, name = entry
            allowed[name] = value
        else:
            allowed[f"{entry.__module__}.{entry.__qualname__}"] = entry
    return allowed


@cache
def _of_torch() -> dict[str, Any]:
    """Return the dtypes, and the types of storages, which stand for dtypes."""
    values: dict[str, Any] = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    for module in ("torch", "torch.storage", "torch.cuda"):
        values.update({f"{module}.{name}": dtype for name, dtype in STORAGE_TYPES.items()})
    return values


@cache
def _of_omegaconf() -> dict[str, Any]:
    """Return OmegaConf's containers and their parts; empty if it is not installed."""
    try:
        base = import_module("omegaconf.base")
    except ModuleNotFoundError:
        return {}
    nodes = vars(import_module("omegaconf.nodes")).values()
    classes = [value for value in nodes if isinstance(value, type) and issubclass(value, base.Node)]
    classes += [base.ContainerMetadata, base.Metadata]
    classes += [import_module("omegaconf").DictConfig, import_module("omegaconf").ListConfig]
    values: dict[str, Any] = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in classes}
    values.update({f"typing.{name}": getattr(typing, name) for name in ("Any", "Dict", "List")})
    return values


# Calls and states


def _stand_in_for_result(function: StandIn, arguments: tuple[Any, ...]) -> StandIn:
    """Return the stand-in for what a call would have made, named as well as can be."""
    name = repr(function)
    first = arguments[0] if arguments else None
    if not isinstance(first, StandIn):
        return function
    if name in ("<stand-in for copyreg._reconstructor>", "<stand-in for copyreg.__newobj__>"):
        return first
    return function


def _set_metadata(value: collections.OrderedDict[Any, Any], state: Any) -> None:
    """Set the versions of modules, the one attribute that a state of weights has."""
    metadata = _names_only(state).get("_metadata")
    if metadata is not None:
        vars(value)["_metadata"] = metadata


def _names_only(state: Any) -> dict[str, Any]:
    if not isinstance(state, dict) or any(type(key) is not str for key in state):
        raise CheckpointError("the state of an object is no dictionary of names")
    return state


def _set_state_of_class(value: Any, state: Any) -> None:
    """Set the state of an object as pickle does."""
    if hasattr(value, "__setstate__"):
        value.__setstate__(state)
        return
    slots: dict[str, Any] = {}
    if isinstance(state, tuple) and len(state) == 2:
        state, slots = state
    vars(value).update(_names_only(state or {}))
    for name, item in _names_only(slots or {}).items():
        setattr(value, name, item)


def _is_of_numpy(value: Any) -> bool:
    values = numpy_values() if type(value).__module__.startswith("numpy") else {}
    return bool(values) and isinstance(value, values["numpy.ndarray"] | values["numpy.dtype"])
