"""Patches of torch and Lightning for the time of a recording: calls of modules, of autograd functions, and the like.

The names that are patched are public. Nothing public reports such calls: a strategy that records a forward is refused
where one of the names is missing.
"""

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

__all__ = [
    "patched_autograd_functions",
    "patched_logging",
    "patched_module_calls",
    "patched_progress",
    "patched_saved_tensor_hooks",
]

# Receives the original, and what it was called with.
OnModuleCall = Callable[[Callable[..., Any], nn.Module, Any, Any], Any]
OnFunctionCall = Callable[[Callable[..., Any], type, Any, Any], Any]


def _classes_with_calls(network: nn.Module) -> set[type]:
    """Return the classes among those of a network's modules that define how a module is called."""
    classes: set[type] = set()
    for module in network.modules():
        for parent in type(module).__mro__:
            is_module_class = issubclass(parent, nn.Module)
            if is_module_class and "__call__" in vars(parent):
                classes.add(parent)
    return classes


@contextmanager
def patched_module_calls(network: nn.Module, on_call: OnModuleCall) -> Iterator[None]:
    """Report calls of a network's modules within the context.

    Args:
        network: The network.
        on_call: Called in place of each module, and of its base class's call within a call of its own.
    """
    with ExitStack() as stack:
        for kind in _classes_with_calls(network):
            # An instance has no call of its own: Python looks it up in the class.
            stack.enter_context(patch.object(kind, "__call__", _reporting(vars(kind)["__call__"], on_call)))
        yield


def _reporting(original: Callable[..., Any], on_call: OnModuleCall) -> Callable[..., Any]:
    """Return a call of a module that is reported, in place of the one that a class defines."""

    def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return on_call(original, module, args, kwargs)

    return call


@contextmanager
def patched_autograd_functions(on_call: OnFunctionCall) -> Iterator[None]:
    """Report calls of autograd functions within the context. A record of their forward would lose their backward.

    Args:
        on_call: Called in place of each.
    """
    # The class method itself, not bound to the class: some versions of torch define it in Python, others in C.
    original = vars(torch.autograd.Function)["apply"]

    def original_apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        return original.__get__(None, cls)(*args, **kwargs)

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return on_call(original_apply, cls, args, kwargs)

    with patch.object(torch.autograd.Function, "apply", classmethod(apply)):
        yield


@contextmanager
def patched_saved_tensor_hooks(on_enter: Callable[[], None]) -> Iterator[None]:
    """Report where activation checkpointing begins, or another hook on saved tensors, within the context.

    Args:
        on_enter: Called before the hooks are set.
    """
    original = saved_tensors_hooks.__enter__

    def enter(hooks: Any) -> None:
        on_enter()
        original(hooks)

    with patch.object(saved_tensors_hooks, "__enter__", enter):
        yield


@contextmanager
def patched_logging(kinds: Iterable[Any], on_log: Callable[..., None]) -> Iterator[None]:
    """Report values that a module logs, in place of logging them, within the context.

    Args:
        kinds: Lightning's classes of modules.
        on_log: Receives the arguments of `log`, without the module. Values of other threads are logged as usual.
    """
    thread = threading.get_ident()
    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(patch.object(kind, "log", _reported(kind.log, on_log, thread)))
        yield


def _reported(original: Callable[..., None], on_log: Callable[..., None], thread: int) -> Callable[..., None]:
    """Return a `log` that reports the values of one thread; the original one takes those of others."""

    def log(module: LightningModule, /, *args: Any, **kwargs: Any) -> None:
        if threading.get_ident() == thread:
            on_log(*args, **kwargs)
        else:
            original(module, *args, **kwargs)

    return log


@contextmanager
def patched_progress(kinds: Iterable[Any], on_read: Callable[[str], None]) -> Iterator[None]:
    """Report that a module reads its trainer, its epoch or its step within the context.

    Args:
        kinds: Lightning's classes of modules.
        on_read: Receives the name of the property.
    """
    with ExitStack() as stack:
        for kind, name in itertools.product(kinds, ("current_epoch", "global_step", "trainer")):
            stack.enter_context(patch.object(kind, name, _noticed(name, vars(kind)[name], on_read)))
        yield


def _noticed(name: str, original: property, on_read: Callable[[str], None]) -> property:
    """Return a property that reports its name when it is read."""

    def read(module: LightningModule) -> Any:
        on_read(name)
        return original.__get__(module)

    return property(read, original.fset)
