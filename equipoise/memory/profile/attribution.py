"""The module that is at work, in the forward and in the backward."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from equipoise.interop.torch.dispatch import tensors_in

__all__ = ["Attribution"]

_MARK = "equipoise.module"


class Attribution:
    """Follows which module computes, between `start` and `stop`.

    A node of the graph belongs to the module whose output it made; those before a module's input to whom called it. So
    the module in a backward is right as far as its graph is entered through what its forward returned.

    Args:
        names: For the id of a module its name.
        on_forward: Called when a module's forward begins.

    Attributes:
        module: The name of the module at work; empty for the root and for what no module does.
    """

    def __init__(self, names: Mapping[int, str], on_forward: Callable[[], None]) -> None:
        self._names, self._on_forward = names, on_forward
        self._stack: list[str] = []
        self._handles: list[Any] = []
        self._in_backward = ""

    @property
    def module(self) -> str:
        """The innermost module."""
        return self._stack[-1] if self._stack else self._in_backward

    def start(self) -> None:
        """Begins to follow."""
        self._handles = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, always_call=True),
        ]

    def stop(self) -> None:
        """Ends it."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.reset()

    def reset(self) -> None:
        """No module is at work: a step begins, or one has failed in its midst."""
        self._stack.clear()
        self._in_backward = ""

    def _before(self, module: nn.Module, args: Any) -> None:
        self._on_forward()
        outer = self.module
        self._mark(args, outer)
        self._stack.append(self._names.get(id(module), outer))

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._stack:  # it began before we did
            return
        name = self._stack.pop()
        self._mark(output, name)

    def _mark(self, value: Any, name: str) -> None:
        """What the backward does from here on belongs to a module."""
        for tensor in tensors_in(value):
            node: Any = tensor.grad_fn
            if node is not None and _MARK not in node.metadata:
                node.metadata[_MARK] = name
                node.register_prehook(partial(self._enter, name))

    def _enter(self, name: str, gradients: Any) -> None:
        self._in_backward = name
