"""The loss and the logged values of a whole batch, from those of the parts that the processes of a row compute."""

from collections.abc import Mapping

import torch
from torch import Tensor

from equipoise.extensions.fsdp.mesh.context.row_mode import LEAST
from equipoise.extensions.fsdp.mesh.context.sequence_row import SequenceRow
from equipoise.interop.lightning.self_log import LogOptions
from equipoise.parallel.batches.weighting import Weight
from equipoise.parallel.step_protocols import StepResult
from equipoise.trainer.logging.collection import Logged
from equipoise.trainer.logging.entry import combined, reduction_name

__all__ = ["combine_parts", "weight_of_part"]


def weight_of_part(result: StepResult) -> Weight | None:
    """Return the weight of a part: a tensor if the user has returned it with the loss, else the number of samples.

    Args:
        result: The result of the part.
    """
    if not isinstance(result.outputs, Mapping) or result.outputs.get("loss_weight") is None:
        return result.weight
    assert result.loss is not None
    # As a tensor, it may be 0 in one process: the others have gradients for its keys.
    return torch.as_tensor(result.weight).to(result.loss.device, torch.float64)


def combine_parts(row: SequenceRow, result: StepResult, *, counts_labels: bool) -> StepResult:
    """Return a result with the values of the whole batch, and the graph of this process's part.

    Args:
        row: The processes, all of which call this together.
        result: The result of this process, with the weight of its part.
        counts_labels: Whether the mean loss of each part counts the labels of all parts already.
    """
    loss = result.loss
    assert loss is not None
    # 1. The share of this process in means, and the weight of all.
    share = torch.full((), 1 / row.size, dtype=torch.float64, device=loss.device)
    weight = result.weight
    # A tensor is a weight that the user has returned.
    if isinstance(weight, Tensor):
        total = row.all_reduce(weight)
        if not counts_labels:
            share = weight / total.clamp(min=LEAST)
        weight = total

    # 2. The values of all processes, in one exchange: share, loss, the logged values, and their sizes.
    values_here = [entry.value.to(share).sum() for entry in result.logged]
    sizes_here = [torch.full_like(share, entry.batch_size or 0) for entry in result.logged]
    numbers = row.all_gather(torch.stack([share, loss.detach().double(), *values_here, *sizes_here]))
    shares, losses, *columns = torch.stack(numbers, 1)
    count = len(result.logged)
    logged = [
        _logged_over_row(entry, shares, values, sizes)
        for entry, values, sizes in zip(result.logged, columns[:count], columns[count:], strict=True)
    ]

    # 3. The loss has the value of the mean over the row, and the gradient of this process's share.
    own = loss * share.to(loss.dtype)
    loss = own + (_mean(losses, shares) - own.detach()).to(loss.dtype)
    return result._replace(loss=loss, weight=weight, logged=logged)


def _logged_over_row(logged: Logged, shares: Tensor, values: Tensor, sizes: Tensor) -> Logged:
    """Return a logged value of the whole batch, from the shares, values and sizes of all processes."""
    reduction = reduction_name(LogOptions(*logged.arguments).reduce_fx)
    if reduction == "mean":
        value = _mean(values, shares)
    else:
        # Sums, minima and maxima have no shares.
        value = combined(values.unbind(), reduction)
    if logged.value.is_floating_point():
        value = value.to(logged.value.dtype)
    if logged.batch_size is not None:
        logged = logged._replace(batch_size=int(sizes.sum()))
    return logged._replace(value=value)


def _mean(values: Tensor, shares: Tensor) -> Tensor:
    # A value without a share may be no number.
    return torch.where(shares > 0, values * shares, 0.0).sum() / shares.sum()
