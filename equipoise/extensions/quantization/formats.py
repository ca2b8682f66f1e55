"""Formats of weights in few bits: four bits by bitsandbytes, eight bits by torchao. Both must be installed on use."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["EightBits", "FourBits", "eight_bits", "four_bits"]

# The number of scales of blocks that share an outer scale.
_OUTER_BLOCK = 256

# The number of values that eight bits of a scale stand for.
_CODES = 256


class FourBits(NamedTuple):
    """Four bits for each value.

    A tuple of plain values, which stages of a pipeline in processes hand on.

    Attributes:
        kind: "nf4" or "fp4".
        blocksize: The number of values that share a scale.
        shape: The shape of the weight.
        dtype: Its dtype.
    """

    kind: str
    blocksize: int
    shape: torch.Size
    dtype: torch.dtype

    def values(self, weight: Tensor, scales: Tensor, outer_scales: Tensor | None) -> Tensor:
        """Return the weight as floats.

        Args:
            weight: The weight, two values in a byte.
            scales: The scales of its blocks: float32, or eight bits if there are outer ones.
            outer_scales: The mean of the scales, the values that their eight bits stand for, and the scales of the
                scales, in this order, float32; None if the scales are float32.
        """
        from bitsandbytes.functional import QuantState, dequantize_4bit

        if outer_scales is None:
            scales_of_blocks = scales.view(torch.float32)
        else:
            scales_of_blocks = _decompressed(scales, outer_scales.view(torch.float32))
        # The class has no types.
        state_of: Any = QuantState
        state = state_of(
            absmax=scales_of_blocks,
            shape=self.shape,
            blocksize=self.blocksize,
            quant_type=self.kind,
            dtype=self.dtype,
        )
        values: Tensor = dequantize_4bit(weight, state)
        return values


def _decompressed(scales: Tensor, floats: Tensor) -> Tensor:
    """Return scales of eight bits as floats.

    Args:
        scales: The scales.
        floats: Their mean, the values that eight bits stand for, and the scales of the scales.
    """
    from bitsandbytes.functional import QuantState, dequantize_blockwise

    state_of: Any = QuantState
    end_of_codes = 1 + _CODES
    mean = floats[0]
    codes = floats[1:end_of_codes]
    outer_scales = floats[end_of_codes:]
    state = state_of(
        absmax=outer_scales,
        code=codes,
        blocksize=_OUTER_BLOCK,
        dtype=torch.float32,
    )
    differences: Tensor = dequantize_blockwise(scales, state)
    return differences + mean


def four_bits(
    weight: Tensor, *, kind: str, blocksize: int, compress_statistics: bool
) -> tuple[FourBits, Tensor, Tensor, Tensor | None]:
    """Store a weight in four bits for each value.

    Args:
        weight: The weight.
        kind: "nf4" or "fp4".
        blocksize: The number of values that share a scale.
        compress_statistics: Whether scales have eight bits.
    """
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(
        weight.contiguous(),
        blocksize=blocksize,
        quant_type=kind,
        compress_statistics=compress_statistics,
    )
    stored_as = FourBits(kind, blocksize, weight.shape, weight.dtype)
    if not state.nested:
        return stored_as, packed, state.absmax.view(torch.int32), None
    # Scales are the differences from their mean.
    floats = torch.cat([state.offset.view(1), state.state2.code, state.state2.absmax])
    return stored_as, packed, state.absmax, floats.view(torch.int32)


class EightBits(NamedTuple):
    """Eight bits for each value, and a scale for each row.

    Attributes:
        shape: The shape of the weight.
    """

    shape: torch.Size

    def values(self, weight: Tensor, scales: Tensor, outer_scales: Tensor | None) -> Tensor:
        """Return the weight as floats.

        Args:
            weight: The weight, int8, in one column.
            scales: The scales of its rows, float32.
            outer_scales: None.
        """
        return weight.view(self.shape) * scales.view(torch.float32)


def eight_bits(weight: Tensor) -> tuple[EightBits, Tensor, Tensor, None]:
    """Store a weight in eight bits for each value."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    rows, columns = weight.shape
    layer = torch.nn.Linear(columns, rows, bias=False, device="meta")
    layer.register_parameter("weight", torch.nn.Parameter(weight, requires_grad=False))
    # The function exchanges the weight of a layer for a tensor of torchao's.
    quantize_(layer, Int8WeightOnlyConfig())
    quantized: Any = layer.weight
    scales = quantized.scale.view(torch.int32)
    # With its own shape, a program that reads the weight would take the integers for its values.
    return EightBits(weight.shape), quantized.qdata.reshape(-1, 1), scales, None
