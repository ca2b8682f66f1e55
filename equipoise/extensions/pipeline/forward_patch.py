"""Replace the forwards of modules for a while, and put the original ones back."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn

__all__ = ["ForwardPatch"]


class ForwardPatch:
    """Replace the forwards of modules.

    Args:
        modules: All modules by their names.
        replacement_for: Makes the forward that replaces the one of the module of this name.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        replacement_for: Callable[[str], Callable[..., Any]],
    ) -> None:
        self._modules = modules
        self._replacement_for = replacement_for
        self._originals: dict[str, Callable[..., Any]] = {}
        # Forwards that the user has set on an instance.
        self._instance_forwards: dict[str, Any] = {}

    def add(self, name: str) -> None:
        """Note the forward of a module, which `apply` will replace.

        Args:
            name: Name of the module.
        """
        module = self._modules[name]
        self._originals[name] = module.forward
        attributes = vars(module)
        if "forward" in attributes:
            self._instance_forwards[name] = attributes["forward"]

    def apply(self) -> None:
        """Replace the forwards."""
        for name in self._originals:
            self._modules[name].forward = self._replacement_for(name)

    def remove(self) -> None:
        """Put the original forwards back."""
        for name in self._originals:
            module = self._modules[name]
            if name in self._instance_forwards:
                module.forward = self._instance_forwards[name]
            elif "forward" in vars(module):
                # The class has the original forward.
                del module.forward

    @contextmanager
    def removed(self) -> Iterator[None]:
        """Put the original forwards back within the context."""
        self.remove()
        try:
            yield
        finally:
            self.apply()

    def original(self, name: str) -> Callable[..., Any]:
        """Return the original forward of a module.

        Args:
            name: Name of the module.
        """
        return self._originals[name]

    def original_of(self, name: str, module: nn.Module) -> Callable[..., Any]:
        """Return the original forward of a module, or of its copy on another device.

        Args:
            name: Name of the module.
            module: The module, or its copy.
        """
        original = self._originals[name]
        is_copy = module is not self._modules[name]
        if is_copy and isinstance(original, MethodType):
            return MethodType(original.__func__, module)
        return original
