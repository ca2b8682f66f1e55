"""Count floating point operations without any effect on what is computed."""

from collections.abc import Collection
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from equipoise.interop.torch.dispatch import DispatchMode, tensors_in

__all__ = ["OperationCounter"]

# Products that a subclass of tensors computes as a whole; torch has no formulas for them.
_WHOLE_PRODUCTS = {"linear", "linear_backward", "matmul", "matmul_backward"}

# Products within one kernel, of which torch has no formula.
_UNKNOWN_PRODUCTS = {"_cudnn_rnn", "_native_multi_head_attention", "_transformer_encoder_layer_fwd", "_trilinear"}
_UNKNOWN_PRODUCTS |= {"miopen_rnn", "mkldnn_rnn_layer", "_scaled_dot_product_fused_attention_overrideable"}


class OperationCounter(DispatchMode):  # type: ignore[misc]
    """Counts the operations within a `with` block by torch's formulas.

    They know products of matrices, convolutions and attention, nearly all operations of a network. Unlike torch's own
    counter this one raises no error, and computes every operation as it is computed without a counter. It sees what the
    thread of the block computes, and its backward.

    Attributes:
        count: Multiplications and additions up to now.
        why_not: The reason why `count` is incomplete; empty if it is complete.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.why_not = ""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: Dynamo traces as it does without a counter, as `torch.cond` needs."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute an operation, and count it."""
        kwargs = kwargs or {}
        # 1. In inference mode composite operations come as a whole; their parts are computed by the same kernel.
        if torch.is_inference_mode_enabled() and not types and _has_parts(func):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        # 2. An error of the operation is the user's.
        result = func(*args, **kwargs)
        # 3. One of a formula is not.
        try:
            self._add(func, types, args, kwargs, result)
        except Exception as error:
            self.why_not = f"the formula of {func} raised {type(error).__name__}: {error}"
        return result

    def _add(self, func: Any, types: Collection[type], args: Any, kwargs: Any, result: Any) -> None:
        operation = getattr(func, "overloadpacket", func)
        is_higher_order = operation is func
        formula = _formula_of(operation)
        # Classes of tensors that compute the operation themselves.
        kinds = {type(tensor) for tensor in tensors_in(result)} & set(types)
        if formula is not None and not kinds:
            self.count += formula(*args, **kwargs, out_val=result)
        elif operation is torch.ops.aten.matmul and not kinds:
            self.count += 2 * result.numel() * args[0].shape[-1]
        elif kinds and (formula is not None or operation.__name__ in _WHOLE_PRODUCTS):
            self.why_not = f"the step computes products of the tensor class {kinds.pop().__name__}"
        elif not is_higher_order and operation.__name__ in _UNKNOWN_PRODUCTS:
            self.why_not = f"the step computes {operation.__name__!r}, of which torch has no formula"
        elif is_higher_order and any(map(callable, args)):
            self.why_not = f"the step computes {operation.name()!r}, whose parts are not seen"


def _formula_of(operation: Any) -> Any:
    """Return torch's formula; for a kernel of CPUs alone that of the other devices, whose products are the same."""
    name = getattr(operation, "__name__", "").replace("_for_cpu", "")
    general = getattr(torch.ops.aten, name, None) if name.startswith("_scaled_dot_product") else None
    return flop_registry.get(operation) or flop_registry.get(general)


def _has_parts(func: Any) -> bool:
    """Return True if an operation may be composed of others, but not in Python, which may round in another way."""
    if getattr(func, "namespace", "") != "aten" or func.overloadpacket in flop_registry:
        return False
    return all(key.name != "CompositeImplicitAutograd" for key in func.py_kernels)
