"""Weights that processes gather in float8, in a quarter of the bytes of float32.

The scale is that of the whole weight, so the weight is rounded as it would be after the gathering.
"""

from typing import Any

import torch
from torch import Tensor

__all__ = ["GatheredInFloat8"]


class GatheredInFloat8:
    """Torch's two methods of a shard that is gathered in another form, here that of torchao.

    Args:
        shard: The shard of a weight, whose memory is read whenever it is gathered.
        config: The way in which the layer multiplies, its `linear_mm_config`.
        dtype: The dtype of float8 of weights.
    """

    def __init__(self, shard: Tensor, config: Any, dtype: torch.dtype) -> None:
        from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

        self._dtype = dtype
        self._sent = WeightWithDynamicFloat8CastTensor(shard, config, dtype)

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        """Return the rounded shard, and the scale of the whole weight, for which processes exchange a number."""
        (values,), metadata = self._sent.fsdp_pre_all_gather(mesh)
        # Backends such as gloo have no float8.
        return (values.view(torch.uint8),), metadata

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """Return the whole weight in float8, or give `out` its scale."""
        (values,) = all_gather_outputs
        return self._sent.fsdp_post_all_gather((values.view(self._dtype),), metadata, param_dtype, out=out)
