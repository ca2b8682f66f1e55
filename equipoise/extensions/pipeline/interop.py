"""Networks cut into stages: the private names that they use; those of recordings stand in `interop/torch`."""

from typing import Any

from equipoise.interop.adapters import DISPATCH_MODE, TENSOR_VERSION, Adapter, Feature, find

__all__ = ["PIPELINE", "is_transformed"]

_CURRENT_LEVEL = "torch._C._functorch.maybe_current_level"
_maybe_current_level: Any = find(_CURRENT_LEVEL)

PIPELINE = Feature(
    "pipeline",
    "strategy='pipeline'",
    (
        TENSOR_VERSION,
        Adapter(
            "torch",
            ("torch.nn.Module.__call__", "torch.autograd.Function.apply", "torch.autograd.graph.saved_tensors_hooks"),
        ),
        DISPATCH_MODE,
        Adapter("torch", ("torch._C.DisableTorchFunction",), "modes of the user see copies of layers"),
        Adapter("torch", (_CURRENT_LEVEL,), "transforms of the network fail in torch"),
    ),
)


def is_transformed() -> bool:
    """Return True within a transform of `torch.func`, such as `vmap` or `grad`; False where no private name tells."""
    return _maybe_current_level is not None and _maybe_current_level() is not None
