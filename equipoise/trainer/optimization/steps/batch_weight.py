"""Weight of a batch in the loss where the user gives none: its number of samples."""

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from equipoise.errors import StepError
from equipoise.notices import rank_zero_warn
from equipoise.parallel.batches.splitting import Splitter, holds_samples, infer_batch_size
from equipoise.parallel.batches.weighting import Weight
from equipoise.trainer.data.sample_counts import SampleCounts

__all__ = ["BatchWeight", "check_weight"]


class BatchWeight:
    """Find the number of samples of a part.

    It is what the module's method `batch_size(batch)` returns if the user defines one, else the first dimension that
    all tensors share. Where they share none, or hold whole samples, the number is that which the loader's batch sampler
    has dealt. Where there is none either, parts have equal weights, and a warning says so once.

    Args:
        splitter: Counts the samples of a batch.
        processes: The number of processes that have a part of each step. Default: 1.

    Attributes:
        counts: The number of samples of each batch of the pass.
    """

    def __init__(self, splitter: Splitter, processes: int = 1) -> None:
        self.counts = SampleCounts()
        self._asks_module = splitter.asks_module
        # Without a method of the module, and with samples in the first dimension, a function does without the splitter.
        self._size: Callable[[Any], int | None] = infer_batch_size
        if splitter.asks_module or splitter.dim:
            self._size = splitter.size
        self._processes = processes
        # True if the number of samples follows from the tensors.
        self._is_settled = False
        self._has_warned = False

    def __call__(self, part: Any, batch_idx: int) -> int:
        """Return the weight of a batch."""
        # 1. The tensors, or the module.
        size = self._size(part)
        if self._is_settled and size is not None:
            return size
        if size is not None and (self._asks_module or not holds_samples(part)):
            self._is_settled = True
            return size

        # 2. The batch sampler.
        count = self.counts.of(batch_idx)
        if count is not None:
            return count

        # 3. The shared dimension of tensors that may hold whole samples, or equal weights.
        if size is None:
            return self._equal_weight()
        return size

    def of_micro_batch(self, micro_batch: Any, batch_idx: int) -> int:
        """Return the weight of a micro-batch, of which the batch sampler knows nothing."""
        size = self._size(micro_batch)
        if size is None:
            return self._equal_weight()
        return size

    def _equal_weight(self) -> int:
        if self._has_warned:
            return 1
        self._has_warned = True
        consequence = "Batches are accumulated with equal weights"
        if self._processes > 1:
            consequence = f"The parts of a step in {self._processes} processes have equal weights"
        rank_zero_warn(
            "The number of samples of a batch cannot be inferred: its tensors differ in their first dimension, and"
            f" no batch sampler tells it. {consequence}. Define `batch_size(self, batch)` in your module, or return"
            " 'loss_weight' with the loss, to weigh them."
        )
        return 1


def check_weight(weight: Any) -> Weight:
    """Return the weight that the user returned with the loss, if it can be one.

    The value of a tensor is not checked: reading it would synchronise its device.

    Raises:
        StepError: If it is anything else.
    """
    if isinstance(weight, Tensor):
        if weight.ndim == 0:
            return weight
        description = f"a tensor of shape {list(weight.shape)}"
    else:
        # True is an int, too.
        is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if is_number and 0 <= weight < math.inf:
            number: Weight = weight
            return number
        description = repr(weight)
    raise StepError(
        "'loss_weight' is the denominator of the mean loss: a number from 0, or a tensor without dimensions, not"
        f" {description}."
    )
