"""Linear layers whose frozen weight is stored in few bits."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from equipoise.errors import StepError
from equipoise.extensions.quantization.chosen_layers import keep_attributes

__all__ = ["Format", "Quantize", "QuantizedLinear", "quantized_layers"]


class Format(Protocol):
    """Format in which a weight is stored."""

    def values(self, weight: Tensor, scales: Tensor, outer_scales: Tensor | None) -> Tensor:
        """Return the weight as floats.

        Args:
            weight: The weight in few bits.
            scales: Its scales.
            outer_scales: Those of the scales; None where there are none.
        """
        ...


# Returns a format, and the tensors in which it stores a weight, all integers. Those that stand for floats have their
# bits, since a conversion of the module to another dtype leaves integers be.
Quantize = Callable[[Tensor], tuple[Format, Tensor, Tensor, Tensor | None]]


class _Product(torch.autograd.Function):
    """The product with a stored weight; the graph keeps the weight as it is stored, and its values never."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        bias: Tensor | None,
        format: Format,
        weight: Tensor,
        scales: Tensor,
        outer_scales: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(weight, scales, outer_scales)
        ctx.format = format
        ctx.dtype = features.dtype
        return linear(features, format.values(weight, scales, outer_scales).to(features.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        of_features = None
        of_bias = None
        if ctx.needs_input_grad[0]:
            # Autocast is off here.
            product = gradient @ ctx.format.values(*ctx.saved_tensors).to(gradient.dtype)
            of_features = product.to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0)
        return of_features, of_bias, None, None, None, None


class QuantizedLinear(nn.Linear):
    """A linear layer with the weight of another one in few bits.

    It computes what `nn.Linear` computes with the stored values. What stores them are frozen parameters of integers, so
    they are copied, moved, sharded and sent to processes as all others are.

    Args:
        layer: The other layer. The bias is shared.
        quantize: Stores the weight, which is on `device`.
        device: The device on which the weight is quantised; it is stored on the device where it was.
        digest: A digest of the weight, which tells it from others.

    Attributes:
        digest: The same.
    """

    def __init__(self, layer: nn.Linear, quantize: Quantize, device: torch.device, digest: str = "") -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        keep_attributes(layer, self)
        weight = layer.weight.detach().to(device)
        # No library quantises float64.
        if weight.dtype == torch.float64:
            weight = weight.float()
        self._format, weight, scales, outer_scales = quantize(weight)
        place = layer.weight.device
        self.weight = nn.Parameter(weight.to(place), requires_grad=False)
        self.scales = nn.Parameter(scales.to(place), requires_grad=False)
        self.outer_scales: nn.Parameter | None = None
        if outer_scales is not None:
            self.outer_scales = nn.Parameter(outer_scales.to(place), requires_grad=False)
        self.bias = layer.bias
        self.digest = digest

    def forward(self, input: Tensor) -> Tensor:
        """Return the product with the stored weight, plus the bias.

        Args:
            input: The features, (..., in_features).

        Raises:
            StepError: If they are integers: some models convert inputs to the dtype of a weight.
        """
        if not input.is_floating_point():
            raise StepError(
                f"A quantised linear layer received {input.dtype}. If the model converts inputs to the dtype of this"
                " layer's weight, leave it whole: Quantization(exclude=[...])."
            )
        product: Any = _Product.apply
        result: Tensor = product(input, self.bias, self._format, self.weight, self.scales, self.outer_scales)
        return result

    def values(self) -> Tensor:
        """Return the weight as floats, (out_features, in_features)."""
        return self._format.values(self.weight, self.scales, self.outer_scales)

    def whole(self, dtype: torch.dtype) -> nn.Linear:
        """Return a layer of torch with the values of this one.

        Args:
            dtype: The dtype of its weight.
        """
        layer = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        keep_attributes(self, layer)
        layer.register_parameter("weight", nn.Parameter(self.values().to(dtype), requires_grad=False))
        layer.register_parameter("bias", self.bias)
        return layer


def quantized_layers(module: nn.Module) -> dict[str, QuantizedLinear]:
    """Return the quantised layers of a module, by name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, QuantizedLinear)}
