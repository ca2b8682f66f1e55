"""Find what a replay would not do again: work of the host.

A replay repeats the kernels of a graph, and nothing else. The conditions of the compiler and its list of changes see
the Python code of a step. Here are found the numbers and tensors of the CPU that a traced graph depends on, the
functions in it that may run Python code, the operations that compute on the CPU, and those for which the host waits.
"""

import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from equipoise.extensions.compiled.interop.compiling import CompilerError
from equipoise.interop.torch.dispatch import OperationWatch, namespace_of, tensors_in

__all__ = ["check_functions", "check_inputs", "on_device_only", "without_waits"]

# Modules whose functions a traced graph may call.
_KNOWN_MODULES = {"torch", "_operator", "builtins", "math"}
# Namespaces of operations that are torch's own. Others may be implemented in Python.
_KNOWN_NAMESPACES = {"aten", "prims", "prim", "higher_order", "profiler"}
# Functions whose modules do not tell whose they are.
_KNOWN_FUNCTIONS = {getattr, operator.getitem}
# Methods that run Python code later.
_HOOK_METHODS = {"register_hook", "register_post_accumulate_grad_hook"}
# The operation by which Python reads the value of a tensor.
_READ = "_local_scalar_dense"
_WAIT = "called a synchronizing CUDA operation"


def check_inputs(inputs: Sequence[Any], device: torch.device) -> None:
    """Check that a graph depends on nothing but tensors of a device.

    Args:
        inputs: The inputs of the graph.
        device: The device.

    Raises:
        CompilerError: If an input is a number, or a tensor of another device.
    """
    for value in inputs:
        if not isinstance(value, Tensor):
            raise CompilerError(f"it computes with the number {value!r}, which a replay would not read again")
        if value.device != device:
            raise CompilerError(f"it computes with a tensor on {value.device}, which a replay would not read again")


def check_functions(graph: Any) -> None:
    """Check that a traced graph calls nothing but torch.

    Args:
        graph: The graph, as a module of torch.fx.

    Raises:
        CompilerError: If it calls a function that may run Python code of the user's.
    """
    for part in graph.modules():
        nodes = getattr(getattr(part, "graph", None), "nodes", ())
        for node in nodes:
            if node.op == "call_function" and not _is_known(node.target):
                raise CompilerError(f"it calls {_name_of(node.target)}, whose Python code a replay would not run")
            if node.op == "call_method" and node.target in _HOOK_METHODS:
                raise CompilerError("it registers a hook on a tensor, which a replay would not run")


def _is_known(function: Callable[..., Any]) -> bool:
    """Return True if a function is torch's own, or Python's arithmetic."""
    namespace = namespace_of(function)
    if namespace is not None:
        return namespace in _KNOWN_NAMESPACES
    if function in _KNOWN_FUNCTIONS:
        return True
    module = getattr(function, "__module__", None)
    if module is None:
        # A method of a class of torch in C.
        module = getattr(getattr(function, "__objclass__", None), "__module__", "")
    if isinstance(module, ModuleType):
        module = module.__name__
    return str(module).partition(".")[0] in _KNOWN_MODULES


def _name_of(function: Any) -> str:
    if namespace_of(function) is not None:
        return str(function)
    return str(getattr(function, "__qualname__", None) or function)


@contextmanager
def on_device_only(device: torch.device) -> Iterator[None]:
    """Refuse work in a `with` block that operations of torch do on the host.

    Args:
        device: The device on which all operations must compute.

    Raises:
        CompilerError: At the end, if an operation has computed with a tensor of another device, or has read a value.
    """
    reasons: list[str] = []

    def look(name: str, output: Any, arguments: Any) -> None:
        if name == _READ:
            reasons.append("it reads the value of a tensor (`.item()`), for which the host waits")
            return
        for tensor in tensors_in([output, arguments]):
            if tensor.device != device:
                reasons.append(f"its operation {name} computes on {tensor.device}, where a replay computes nothing")
                return

    watch = OperationWatch(look)
    watch.start()
    try:
        yield
    finally:
        watch.stop()
    if reasons:
        raise CompilerError(reasons[0])


@contextmanager
def without_waits() -> Iterator[None]:
    """Refuse operations in a `with` block for which the host waits: they would break a capture.

    Raises:
        CompilerError: At the end, if the host has waited.
    """
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    for warning in caught:
        if _WAIT in str(warning.message):
            raise CompilerError("the host waits for the device in it, which a captured step cannot do")
