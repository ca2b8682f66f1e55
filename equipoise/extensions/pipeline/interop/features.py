"""Networks cut into stages: the private names that they use; those of recordings stand in `interop/torch`."""

from equipoise.extensions.pipeline.interop.transforms import TRANSFORMS
from equipoise.interop.adapters import DISPATCH_MODE, TENSOR_VERSION, Adapter, Feature

__all__ = ["PIPELINE"]

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
        TRANSFORMS,
    ),
)
