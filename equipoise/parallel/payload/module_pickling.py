"""Pickle modules that pickle refuses: parametrised and compiled ones, and compiled functions.

A parametrised module belongs to a class that torch makes at run time. A compiled function holds torch's compiler, and
`module.compile()` leaves one in the module, which the module's own state leaves out. In another process the class is
made anew, and what was compiled is compiled on first use, with the same options.
"""

import copyreg
import pickle
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

__all__ = ["reduce_module_or_function"]

_ORIGINAL = "_torchdynamo_orig_callable"  # how torch's compiled functions name what they were made of
_DISABLED = "_torchdynamo_disable"  # what torch's compiler is to leave alone names its original, too
_CALL = "_compiled_call_impl"  # where `module.compile()` leaves its work


def reduce_module_or_function(value: Any) -> Any:
    """Return what pickle needs to make a module or a function again; NotImplemented if it can do so by itself."""
    if isinstance(value, nn.Module):
        compiled = vars(value).get(_CALL)
        if parametrize.is_parametrized(value):
            kind = parametrize.type_before_parametrizations(value)
            names = tuple(value.parametrizations)  # type: ignore[arg-type]
            read_state: Any = kind.__getstate__  # its own class refuses
            state = read_state(value)
            return _new_parametrised, (kind, names), (kind, state, compiled), None, None, _set_state
        if compiled is not None:
            return _reduced_with_call(value, compiled)
    elif isinstance(value, FunctionType) and hasattr(value, _ORIGINAL) and not hasattr(value, _DISABLED):
        compiler = _compiler_of(value)
        if compiler is not None:
            return _compiled, (compiler, getattr(value, _ORIGINAL))
    return NotImplemented


def _new_parametrised(kind: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """Return an empty module of the class that torch derives from another for parametrised tensors of these names."""
    pattern = kind.__new__(kind)
    nn.Module.__init__(pattern)
    for name in names:
        pattern.register_parameter(name, nn.Parameter(torch.empty(0)))
        parametrize.register_parametrization(pattern, name, nn.Identity())
    derived = type(pattern)
    return derived.__new__(derived)


def _set_state(module: nn.Module, content: tuple[type[nn.Module], Any, Callable[..., Any] | None]) -> None:
    kind, state, compiled = content
    write_state: Any = kind.__setstate__
    write_state(module, state)
    if compiled is not None:
        vars(module)[_CALL] = compiled


def _reduced_with_call(module: nn.Module, compiled: Callable[..., Any]) -> Any:
    """Return how a module is made again that was compiled in place."""
    reduced: Any = module.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    make, arguments, state, *_ = reduced
    if make is not copyreg.__newobj__:  # type: ignore[attr-defined]
        return NotImplemented  # it has a way of its own
    return make, arguments, (type(module), state, compiled), None, None, _set_state


def _compiler_of(function: FunctionType) -> Any:
    """Return the object that has compiled a function, which makes another of the same options."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    held = {name: cell.cell_contents for name, cell in cells}
    return held.get("self")


def _compiled(compiler: Any, original: Callable[..., Any]) -> Any:
    return compiler(original)
