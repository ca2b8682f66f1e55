"""The weight of a part where the user says nothing: its number of samples."""

import math
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from equipoise.errors import StepError
from equipoise.parallel.split import Splitter, infer_batch_size
from equipoise.parallel.weighting import Weight

__all__ = ["Weigher", "check_weight"]


class Weigher:
    """Finds the number of samples of a part.

    Asks the module's method `batch_size(batch)` if the user defines one, else takes the first dimension that all
    tensors share. Where they share none, parts weigh the same, and a warning says so once.

    Args:
        module: The user's module.
        dim: The dimension of the samples. Default: the first.
    """

    def __init__(self, module: LightningModule, dim: int = 0) -> None:
        splitter = Splitter(module, dim)
        self._size = splitter.size if splitter.asks_module or dim else infer_batch_size
        self._warned = False

    def __call__(self, part: Any) -> int:
        """The weight of a part."""
        size = self._size(part)
        if size is not None:
            return size
        if not self._warned:
            self._warned = True
            rank_zero_warn(
                "The number of samples of a batch cannot be inferred: its tensors differ in their first dimension."
                " Batches are accumulated with"
                " equal weights. Define `batch_size(self, batch)` in your module, or return 'loss_weight' with the"
                " loss, to weigh them."
            )
        return 1


def check_weight(weight: Any) -> Weight:
    """The weight that the user returned with the loss, if it can be one; the sign of a tensor is not looked at.

    Args:
        weight: A number from 0, or a tensor without dimensions.

    Raises:
        StepError: If it is anything else.
    """
    if isinstance(weight, Tensor):
        fits = weight.ndim == 0
    else:
        fits = isinstance(weight, (int, float)) and not isinstance(weight, bool) and 0 <= weight < math.inf
    if not fits:
        raise StepError(
            "'loss_weight' is the denominator of the mean loss: a number from 0, or a tensor without dimensions, not"
            f" {f'a tensor of shape {list(weight.shape)}' if isinstance(weight, Tensor) else repr(weight)}."
        )
    checked: Weight = weight
    return checked
