"""Lightning's precisions of few bits, in our words: those of bitsandbytes are quantised weights, not a precision."""

from typing import Any, NamedTuple

import torch
from lightning.pytorch import plugins as theirs

from equipoise.errors import ConfigurationError
from equipoise.interop.lightning.classes import is_a

__all__ = ["QuantizationInUse", "quantization_in_our_words", "refuse_float8"]

# The layers that the plugin inserts, and their counterparts here.
_LAYERS = {
    "_NF4Linear": ("nf4", False),
    "_NF4DQLinear": ("nf4", True),
    "_FP4Linear": ("fp4", False),
    "_FP4DQLinear": ("fp4", True),
}
_PRECISIONS = {torch.bfloat16: "bf16-true", torch.float16: "16-true", torch.float32: "32-true"}


class QuantizationInUse(NamedTuple):
    """A BitsandbytesPrecision in our words.

    Attributes:
        precision: The precision in which layers compute.
        options: Arguments of the callback `Quantization`.
    """

    precision: str
    options: dict[str, Any]


def quantization_in_our_words(precision: Any) -> QuantizationInUse | None:
    """Return what a BitsandbytesPrecision means here; None for all other precisions.

    Args:
        precision: The Trainer's argument.

    Raises:
        ConfigurationError: If the plugin computes what nothing here does.
    """
    if not is_a(precision, theirs.BitsandbytesPrecision):
        return None
    layer = getattr(getattr(precision, "_linear_cls", None), "__name__", "an unknown layer")
    dtype = _PRECISIONS.get(precision.dtype)
    if layer not in _LAYERS or dtype is None:
        raise ConfigurationError(
            f"BitsandbytesPrecision with {layer} in {precision.dtype} has no counterpart: 'nf4', 'nf4-dq', 'fp4' and"
            " 'fp4-dq' have, in float16, bfloat16 and float32. For weights of eight bits take"
            " callbacks=[Quantization('int8')], which multiplies in the dtype of the input."
        )
    kind, compress_statistics = _LAYERS[layer]
    # The plugin leaves out the layers whose names begin so.
    exclude = [f"{prefix}*" for prefix in sorted(precision.ignore_modules)]
    return QuantizationInUse(dtype, {"kind": kind, "compress_statistics": compress_statistics, "exclude": exclude})


def refuse_float8(precision: Any) -> None:
    """Refuse a precision of another library in float8, which computes in another way than those that there are here.

    Args:
        precision: A plugin, or the name of such a precision.

    Raises:
        ConfigurationError: If it is a name, or the plugin for float8.
    """
    is_plugin = is_a(precision, theirs.TransformerEnginePrecision)
    if is_plugin or isinstance(precision, str):
        name = "TransformerEnginePrecision" if is_plugin else f"precision={precision!r}"
        raise ConfigurationError(
            f"{name} is no precision here. Take precision='fp8', or 'fp8-true' for weights in bfloat16: their linear"
            " layers compute in float8, with scales of the present tensors instead of earlier ones."
        )
