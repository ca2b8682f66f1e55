"""Weight of a batch in the loss where the user gives none: its number of samples."""

import math
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from equipoise.errors import StepError
from equipoise.notices import rank_zero_warn
from equipoise.parallel.batches.splitting import Splitter, holds_samples, infer_batch_size
from equipoise.parallel.batches.weighting import Weight
from equipoise.trainer.data.sample_counts import SampleCounts

__all__ = ["BatchWeight", "check_weight"]


class BatchWeight:
    """Finds the number of samples of a part.

    It asks the module's method `batch_size(batch)` if the user defines one, else takes the first dimension that all
    tensors share. Where they share none, or hold whole samples, the number is that which the loader's batch sampler has
    dealt. Where there is none either, parts weigh the same, and a warning says so once.

    Args:
        module: The user's module.
        dim: The dimension of the samples. Default: the first.
        processes: The number of processes that have a part of each step. Default: 1.

    Attributes:
        counts: The samples of each batch of the pass.
    """

    def __init__(self, module: LightningModule, dim: int = 0, processes: int = 1) -> None:
        splitter = Splitter(module, dim)
        self.counts = SampleCounts()
        self._asks_module = splitter.asks_module
        self._size = splitter.size if splitter.asks_module or dim else infer_batch_size
        self._processes = processes
        self._is_settled = False  # whether tensors tell the number of samples
        self._warned = False

    def __call__(self, part: Any, batch_idx: int) -> int:
        """Return the weight of a batch.

        Args:
            part: The batch, or this process's part of it.
            batch_idx: Its number in the pass.
        """
        size = self._size(part)
        if self._is_settled and size is not None:
            return size
        if size is not None and (self._asks_module or not holds_samples(part)):
            self._is_settled = True
            self.counts.stop()
            return size
        count = self.counts.of(batch_idx)
        if count is not None:
            return count
        self.counts.go_on()
        return self._unknown() if size is None else size

    def of_micro_batch(self, micro_batch: Any, batch_idx: int) -> int:
        """Return the weight of a micro-batch, of which the batch sampler knows nothing."""
        size = self._size(micro_batch)
        return self._unknown() if size is None else size

    def _unknown(self) -> int:
        """Return the weight of a batch whose number of samples nobody knows, and say so once."""
        if not self._warned:
            self._warned = True
            if self._processes > 1:
                consequence = f"The parts of a step in {self._processes} processes have equal weights"
            else:
                consequence = "Batches are accumulated with equal weights"
            rank_zero_warn(
                "The number of samples of a batch cannot be inferred: its tensors differ in their first dimension, and"
                f" no batch sampler tells it. {consequence}. Define `batch_size(self, batch)` in your module, or return"
                " 'loss_weight' with the loss, to weigh them."
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
