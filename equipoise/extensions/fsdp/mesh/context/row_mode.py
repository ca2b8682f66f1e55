"""The functions of torch that see more than one position, for processes that have parts of sequences.

Everything else in a network computes each position by itself, or differs from the whole in the comparison of the first
batch.
"""

import inspect
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from equipoise.extensions.fsdp.mesh.context.attention import attend
from equipoise.extensions.fsdp.mesh.context.multi_head import attend_in_heads
from equipoise.extensions.fsdp.mesh.context.sequence_row import SequenceRow
from equipoise.extensions.fsdp.mesh.without_dropout import DROPOUTS
from equipoise.interop.torch.autograd import run_backward_in_modes

__all__ = ["LEAST", "RowMode"]

Answer = Callable[..., Any]

# In place of 0, by which a gradient of 0 would be divided.
LEAST = 1e-300


class RowMode(TorchFunctionMode):
    """Lets functions of torch compute for whole sequences, in a `with` block of this thread.

    - Attention sees the keys of all processes.
    - A mean of cross-entropy counts the labels of all processes, so that the mean over the processes is that of the
      whole.
    - Dropout draws other numbers in each process.
    - A backward computes again in this mode what activation checkpointing computes again.

    Args:
        row: The processes that have parts of the same sequences.
        draws: Whether dropout draws numbers. Default: True.

    Attributes:
        counts_labels: Whether a mean has counted the labels of all processes.
        answers: For functions of torch, those that are called in their place.
    """

    def __init__(self, row: SequenceRow, *, draws: bool = True) -> None:
        super().__init__()
        self._draws = draws
        self.counts_labels = False
        self._row = row
        self._is_in_backward = False
        self.answers: dict[Any, Answer] = {
            functional.scaled_dot_product_attention: self._attention,
            functional.multi_head_attention_forward: self._heads,
            functional.cross_entropy: self._mean,
            functional.nll_loss: self._mean,
            Tensor.backward: self._backward,
            **dict.fromkeys(DROPOUTS, self._dropout),
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        answer = self.answers.get(func)
        # Outside of blocks that compute parts, sequences are whole.
        is_for_parts = self._row.is_divided or func is Tensor.backward
        if answer is None or not is_for_parts:
            return func(*args, **(kwargs or {}))
        return answer(func, *args, **(kwargs or {}))

    def _attention(
        self,
        func: Answer,
        query: Any,
        key: Any,
        value: Any,
        mask: Any = None,
        dropout_p: float = 0.0,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        dropout_p = kwargs.pop("dropout_p", dropout_p)
        mask = kwargs.pop("attn_mask", mask)
        with self._numbers_of_process(dropout_p):
            return attend(self._row, query, key, value, mask, dropout_p, *args, **kwargs)

    def _heads(self, func: Answer, *args: Any, **kwargs: Any) -> Any:
        arguments = inspect.signature(func).bind(*args, **kwargs).arguments
        if arguments["key"].size(0) != self._row.part_length:
            return func(*args, **kwargs)
        with self._numbers_of_process(arguments["dropout_p"] * arguments.get("training", True)):
            return attend_in_heads(self._row, arguments)

    def _dropout(
        self,
        func: Answer,
        input: Tensor,
        p: float = 0.5,
        training: bool | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if training is None:
            # The function of `torch` itself has another name for it.
            training = kwargs.pop("train", func is not functional.feature_alpha_dropout)
        with self._numbers_of_process(p * training):
            return func(input, p, training, *args, **kwargs)

    @contextmanager
    def _numbers_of_process(self, probability: float) -> Iterator[None]:
        """Draw random numbers of this process, which follow from those of the row, if any are drawn at all."""
        if not probability or not self._draws:
            yield
            return
        devices = []
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            devices.append(torch.cuda.current_device())
            # The host's numbers, such as the order of data, are those of a run on one device. The state is on the host.
            seed = zlib.crc32(bytes(torch.cuda.get_rng_state().tolist()))
            torch.empty((), device="cuda").uniform_()
        else:
            seed = int(torch.randint(2**62, (), device="cpu"))
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed + self._row.rank)
            yield

    def _mean(self, func: Answer, *args: Any, **kwargs: Any) -> Any:
        """Return a mean loss of which the mean over the processes is that over all labels."""
        arguments = inspect.signature(func).bind(*args, **kwargs).arguments
        mean = func(*args, **kwargs)
        # The first two are former names of the third.
        is_former = arguments.get("size_average") is not None or arguments.get("reduce") is not None
        if is_former or arguments.get("reduction", "mean") != "mean":
            return mean
        self.counts_labels = True
        here = _weight_of_labels(**arguments)
        everywhere = self._row.all_reduce(here)
        factor = here * self._row.size / everywhere.clamp(min=LEAST)
        # Without a label the mean is no number here, unless no process has one.
        is_nothing = (here == 0) & (everywhere > 0)
        return torch.where(is_nothing, torch.zeros_like(mean), mean * factor.to(mean.dtype))

    def _backward(self, func: Answer, loss: Tensor, gradient: Tensor | None = None, **options: Any) -> None:
        # Torch passes on the options that it has by default as well.
        if self._is_in_backward or any(options.values()):
            func(loss, gradient, **options)
            return
        self._is_in_backward = True
        try:
            with self:
                run_backward_in_modes(loss, gradient)
        finally:
            self._is_in_backward = False


def _weight_of_labels(
    input: Tensor, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100, **_: Any
) -> Tensor:
    """Return the number by which `cross_entropy` divides: that of labels, or the sum of their weights."""
    if target.is_floating_point():
        # Probabilities of classes, which lie in the second dimension, or the only one.
        dim = min(1, target.ndim - 1)
        return target.new_full((), target.numel() // target.size(dim), dtype=torch.float64)
    is_counted = target != ignore_index
    if weight is None:
        return is_counted.sum().double()
    return (weight[torch.where(is_counted, target, 0)] * is_counted).sum().double()
