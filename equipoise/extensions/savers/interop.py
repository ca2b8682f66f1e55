"""Savers of memory: the private names that they use, which stand in `interop/torch`."""

from equipoise.interop.adapters import DISPATCH_MODE, TENSOR_VERSION, Feature

__all__ = ["INPLACE", "OFFLOAD"]

INPLACE = Feature("inplace", "InplaceActivations", (DISPATCH_MODE,))
OFFLOAD = Feature("offload", "Trainer(offload_activations=True)", (TENSOR_VERSION,))
