"""Hooks of modules: a forward may register some in its first call."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from equipoise.interop.torch.modules import hook_registries_of

__all__ = ["preserved_hooks"]


@contextmanager
def preserved_hooks(module: nn.Module) -> Iterator[None]:
    """Remove hooks of a module and its submodules that are registered within the context, and restore removed ones.

    Args:
        module: The module.

    Example:
        >>> module = nn.Identity()
        >>> with preserved_hooks(module):
        ...     handle = module.register_forward_hook(lambda *arguments: None)
        >>> len(module._forward_hooks)
        0
    """
    registries = []
    for submodule in module.modules():
        registries += hook_registries_of(submodule)
    contents = [dict(registry) for registry in registries]
    try:
        yield
    finally:
        for registry, content in zip(registries, contents, strict=True):
            registry.clear()
            registry.update(content)
