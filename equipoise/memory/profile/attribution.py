"""Follow which module computes, in the forward and in the backward."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from equipoise.interop.torch.dispatch import tensors_in

__all__ = ["Attribution"]

# Key in the metadata of a graph's node for the name of its module.
_KEY = "equipoise.module"


class Attribution:
    """Follows the module that computes, between `start` and `stop`.

    A node of the graph belongs to the module whose output it created. The node of a module's input belongs to the
    caller of the module. So the module in a backward is right as long as the backward enters the module's graph through
    the output of its forward.

    Args:
        names: Names of the modules by their ids.
        on_forward: Function to call when a module's forward begins.
    """

    def __init__(self, names: Mapping[int, str], on_forward: Callable[[], None]) -> None:
        self._names = names
        self._on_forward = on_forward
        # Modules whose forward runs, the innermost last.
        self._stack: list[str] = []
        self._handles: list[Any] = []
        self._in_backward = ""

    @property
    def module(self) -> str:
        """Name of the innermost module that computes; empty for the root, and for code outside of modules."""
        if self._stack:
            return self._stack[-1]
        return self._in_backward

    def start(self) -> None:
        """Begin to follow."""
        self._handles = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, always_call=True),
        ]

    def stop(self) -> None:
        """Stop following."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.reset()

    def reset(self) -> None:
        """Forget the present module: a step begins, or a step has failed."""
        self._stack.clear()
        self._in_backward = ""

    def _before(self, module: nn.Module, args: Any) -> None:
        self._on_forward()
        outer = self.module
        self._mark(args, outer)
        self._stack.append(self._names.get(id(module), outer))

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        # The forward began before `start`.
        if not self._stack:
            return
        self._mark(output, self._stack.pop())

    def _mark(self, value: Any, name: str) -> None:
        """Attribute the backward to a module from the nodes of these tensors on."""
        for tensor in tensors_in(value):
            node: Any = tensor.grad_fn
            # The first mark counts: an output may pass through several modules.
            if node is not None and _KEY not in node.metadata:
                node.metadata[_KEY] = name
                node.register_prehook(partial(self._enter, name))

    def _enter(self, name: str, gradients: Any) -> None:
        self._in_backward = name
