"""Pickle modules that pickle refuses: parametrised and compiled ones, and compiled functions.

Torch creates the class of a parametrised module at run time. A compiled function holds torch's compiler, and
`module.compile()` stores one in the module, which the module's own state leaves out. The other process creates the
class again, and compiles modules and functions on first use, with the same options.
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

# Attribute of a compiled function that refers to the original function.
_ORIGINAL = "_torchdynamo_orig_callable"
# Attribute of a function that torch's compiler skips; it refers to its original, too.
_DISABLED = "_torchdynamo_disable"
# Attribute in which `module.compile()` stores the compiled call.
_CALL = "_compiled_call_impl"


# The result of `__reduce_ex__`, or NotImplemented: a function that creates an object, its arguments, the content, items
# of lists and of dictionaries, of which modules have none, and a function that sets the content.
Reduced = Any
# The class of a module, its state and its compiled call.
Content = tuple[type[nn.Module], Any, Callable[..., Any] | None]


def reduce_module_or_function(value: Any) -> Reduced:
    """Reduce a module or function for pickle; NotImplemented if pickle's own way works.

    Args:
        value: Any object.
    """
    if isinstance(value, nn.Module):
        return _reduce_module(value)
    if isinstance(value, FunctionType):
        return _reduce_function(value)
    return NotImplemented


def _reduce_module(module: nn.Module) -> Reduced:
    compiled = vars(module).get(_CALL)
    if parametrize.is_parametrized(module):
        return _reduce_parametrised_module(module, compiled)
    if compiled is not None:
        return _reduce_compiled_module(module, compiled)
    return NotImplemented


def _reduce_parametrised_module(module: nn.Module, compiled: Callable[..., Any] | None) -> Reduced:
    """Reduce a parametrised module, together with its compiled call if there is one."""
    kind = parametrize.type_before_parametrizations(module)
    names = tuple(module.parametrizations)  # type: ignore[arg-type]
    # The class that torch created refuses to be pickled; the class before it does not.
    read_state: Any = kind.__getstate__
    state = read_state(module)
    return _new_parametrised, (kind, names), (kind, state, compiled), None, None, _set_state


def _reduce_compiled_module(module: nn.Module, compiled: Callable[..., Any]) -> Reduced:
    """Reduce a module that was compiled in place, together with its compiled call."""
    reduced: Any = module.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    create, arguments, state, *_ = reduced
    if create is not copyreg.__newobj__:  # type: ignore[attr-defined]
        # The class defines its own way to be pickled.
        return NotImplemented
    return create, arguments, (type(module), state, compiled), None, None, _set_state


def _reduce_function(function: FunctionType) -> Reduced:
    # Pickle can send a function that torch has not compiled.
    if not hasattr(function, _ORIGINAL):
        return NotImplemented
    if hasattr(function, _DISABLED):
        return NotImplemented
    compiler = _compiler_of(function)
    if compiler is None:
        return NotImplemented
    return _compile, (compiler, getattr(function, _ORIGINAL))


def _compiler_of(function: FunctionType) -> Any:
    """Return the object that has compiled a function; it compiles another with the same options."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    variables = {name: cell.cell_contents for name, cell in cells}
    return variables.get("self")


# In the other process


def _new_parametrised(kind: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """Return an empty module of the class that torch derives from another for parametrised tensors of these names."""
    pattern = kind.__new__(kind)
    nn.Module.__init__(pattern)
    for name in names:
        pattern.register_parameter(name, nn.Parameter(torch.empty(0)))
        parametrize.register_parametrization(pattern, name, nn.Identity())
    derived = type(pattern)
    return derived.__new__(derived)


def _set_state(module: nn.Module, content: Content) -> None:
    kind, state, compiled = content
    write_state: Any = kind.__setstate__
    write_state(module, state)
    if compiled is not None:
        vars(module)[_CALL] = compiled


def _compile(compiler: Any, original: Callable[..., Any]) -> Any:
    return compiler(original)
