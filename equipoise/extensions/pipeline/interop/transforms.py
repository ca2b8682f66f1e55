"""Transforms of `torch.func`, such as `vmap`."""

from typing import Any

from equipoise.interop.adapters import Adapter, find

__all__ = ["TRANSFORMS", "is_transformed"]

_CURRENT_LEVEL = "torch._C._functorch.maybe_current_level"
TRANSFORMS = Adapter("torch", (_CURRENT_LEVEL,), "transforms of the network fail in torch")
_maybe_current_level: Any = find(_CURRENT_LEVEL)


def is_transformed() -> bool:
    """Return True within a transform of `torch.func`, such as `vmap` or `grad`; False where no private name tells."""
    return _maybe_current_level is not None and _maybe_current_level() is not None
