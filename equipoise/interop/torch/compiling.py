"""Compile a function that runs a backward, with torch's compiler; private names of torch behind it.

Each name stands here with the reason why nothing public does; a test notices when one of them changes.

torch's compiler is imported with the first function that is compiled: it takes longer than all of torch.
"""

import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import FunctionType, MethodType
from typing import Any

import torch

__all__ = ["CompiledFunction", "CompilerError", "NewVariant", "why_not_compiled"]

# Options of the backend. Random numbers are drawn by torch's own operations, so they are those of the eager step.
_OPTIONS: Mapping[str, Any] = {"fallback_random": True}

# Settings while a function is traced. There is no public way to any of them.
_SETTINGS: Mapping[str, Any] = {
    # Trace the backward as a part of the function.
    "trace_autograd_ops": True,
    # Notice hooks that are added to a module later.
    "skip_nnmodule_hook_guards": False,
}

# The last line of the user's in a message of the compiler.
_USER_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in')

# A condition that no longer holds, in a message of the compiler: "- 0/1: module.scale == 1.0    # ...".
_CONDITION = re.compile(r"- \d+/\d+: (?P<condition>.+?)\s*(?:#.*)?$", re.MULTILINE)


class NewVariant(Exception):
    """The function would be compiled anew, which is not allowed at this time."""


class CompilerError(Exception):
    """The function cannot be compiled; the message gives the reason."""


@cache
def why_not_compiled() -> str | None:
    """Return the reason why no training step can be compiled here; None if there is none."""
    config = _config()
    for name in _SETTINGS:
        if not hasattr(config, name):
            return f"torch {torch.__version__} has no setting {name}; torch 2.13 has it"
    return None


class CompiledFunction:
    """A function that torch's compiler computes.

    A variant is compiled for each combination of conditions that the Python code of the function depends on, such as
    the shapes of its arguments and the attributes that it reads.

    Args:
        function: The function. It may run a backward, which writes gradients into parameters.

    Attributes:
        number_of_variants: Number of variants that were compiled.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.number_of_variants = 0
        self._may_compile = False
        self._compiled = torch.compile(_with_own_code(function), fullgraph=True, backend=self._compile)

    def __call__(self, *args: Any) -> Any:
        """Call the function by a variant that exists.

        Raises:
            NewVariant: If no variant fits. Nothing was computed then.
        """
        try:
            return self._compiled(*args)
        except Exception as error:
            if _is_of_compiler(error):
                raise NewVariant from None
            raise

    def compile(self, *args: Any) -> Any:
        """Call the function, and compile a new variant if no other fits.

        Raises:
            CompilerError: If the compiler cannot compile the function.
        """
        self._may_compile = True
        try:
            with _compiler_settings():
                return self._compiled(*args)
        except Exception as error:
            if _is_of_compiler(error):
                raise CompilerError(_reason(error)) from error
            raise
        finally:
            self._may_compile = False

    def unmet_conditions(self, *args: Any) -> list[str]:
        """Return the conditions of the variants that do not hold for these arguments, as Python expressions."""
        try:
            with _compiler_settings(), torch.compiler.set_stance("fail_on_recompile"):
                self._compiled(*args)
        except Exception as error:
            conditions = [match["condition"] for match in _CONDITION.finditer(str(error))]
            return list(dict.fromkeys(conditions))
        return []

    def _compile(self, graph: Any, inputs: Any) -> Any:
        """Compile a graph; the backend of torch's compiler."""
        if not self._may_compile:
            raise NewVariant
        self.number_of_variants += 1
        return _lower(graph, inputs)


def _lower(graph: Any, inputs: Any) -> Any:
    """Return the function that computes a graph; public ways to the backend take no function before it."""
    from torch._dynamo import lookup_backend

    inductor: Callable[..., Any] = lookup_backend("inductor")
    return inductor(graph, inputs, config_patches=dict(_OPTIONS))


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a function or method whose code is an object of its own.

    The compiler keeps the variants with the code: they would count for all functions with this code.
    """
    owner = getattr(function, "__self__", None)
    original = inspect.unwrap(function if owner is None else function.__func__)  # type: ignore[attr-defined]
    copy = FunctionType(
        original.__code__.replace(),
        original.__globals__,
        original.__name__,
        original.__defaults__,
        original.__closure__,
    )
    copy.__kwdefaults__ = original.__kwdefaults__
    return copy if owner is None else MethodType(copy, owner)


@contextmanager
def _compiler_settings() -> Iterator[None]:
    """Set what a function with a backward needs while it is traced, and hide the compiler's own warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _config().patch(_SETTINGS):
            yield


def _config() -> Any:
    """Return the settings of the compiler."""
    import torch._dynamo.config

    return torch._dynamo.config


def _is_of_compiler(error: Exception) -> bool:
    """Return True if the compiler raised an error, and not the computation."""
    from torch._dynamo import exc

    return isinstance(error, exc.TorchDynamoException | exc.FailOnRecompileLimitHit)


def _reason(error: Exception) -> str:
    """Return the reason that the compiler gives, in one sentence, with the user's line."""
    # 1. The backend's own error, such as a missing compiler of C++.
    inner = getattr(error, "inner_exception", None)
    message = str(error if inner is None else inner)
    first_line = message.strip().partition("\n")[0].strip() or type(error).__name__
    reason = first_line.rstrip(".")

    # 2. The line of the user's code.
    _, _, trace = str(error).partition("from user code:")
    lines = list(_USER_LINE.finditer(trace))
    if lines:
        last = lines[-1]
        reason += f" ({last['file']}, line {last['line']})"
    return reason
