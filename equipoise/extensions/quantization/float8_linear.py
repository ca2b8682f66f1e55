"""The layer that computes in float8. This file imports torchao, so it is imported on use."""

import torch
from torch import Tensor
from torchao.float8.float8_linear import Float8Linear as TheirFloat8Linear

__all__ = ["Float8Linear"]


class Float8Linear(TheirFloat8Linear):  # type: ignore[misc]
    """torchao's layer, which under `torch.inference_mode` and autocast meets an operation that its tensors lack."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the product; under `inference_mode` it is computed under `no_grad`, with the same result.

        Args:
            input: The features, (..., in_features).
        """
        if not torch.is_inference_mode_enabled():
            return self._product(input)
        with torch.inference_mode(False), torch.no_grad():
            return self._product(input)

    def _product(self, input: Tensor) -> Tensor:
        output: Tensor = super().forward(input)
        return output
