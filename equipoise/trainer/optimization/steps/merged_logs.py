"""Values that the parts of a batch logged, merged into one value each."""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torchmetrics import Metric

from equipoise.interop.lightning.self_log import LogOptions
from equipoise.parallel.batches.weighting import Weight, weighted_mean
from equipoise.trainer.logging.collection import Logged
from equipoise.trainer.logging.entry import combined, reduction_name
from equipoise.trainer.logging.logs import Logs

__all__ = ["log_merged"]


# The values that the parts logged by one call, each with the weight of its part.
_Values = list[tuple[Logged, Weight]]


def log_merged(
    logs: Logs,
    parts: Sequence[Sequence[Logged]],
    weights: Sequence[Weight],
    device: torch.device,
    original: Callable[[Metric], Metric],
) -> None:
    """Log each value of a batch once: means by weight, others by their own reduction, metrics as the module's own.

    Args:
        logs: Receives the merged values.
        parts: The values that each part logged. Parts whose weight is the number 0 are left out.
        weights: The weights of the parts.
        device: The device of the merged values.
        original: Function that returns the module's metric for a copy of it.
    """
    # 1. The values of all parts, by hook and name, and by their number: a hook may log a name several times.
    values: dict[tuple[str | None, str, int], _Values] = {}
    for part, weight in zip(parts, weights, strict=True):
        has_weight = isinstance(weight, Tensor) or weight != 0
        if not has_weight:
            continue
        counts: Counter[tuple[str | None, str]] = Counter()
        for logged in part:
            name_in_hook = (logged.hook, logged.name)
            key = (*name_in_hook, counts[name_in_hook])
            values.setdefault(key, []).append((logged, weight))
            counts[name_in_hook] += 1

    # 2. One value of each. For a value of any other type, `add` raises the error that it gets in any step.
    for part_values in values.values():
        first, _ = part_values[0]
        merged = first.value
        size = first.batch_size
        if isinstance(merged, Metric):
            merged = original(merged)
        elif isinstance(merged, Tensor):
            merged = _reduced(part_values, device)
            sizes = [logged.batch_size for logged, _ in part_values if logged.batch_size is not None]
            size = None
            if sizes:
                size = sum(sizes)
        logs.add(first.hook, first.name, merged, first.arguments, size)


def _reduced(values: _Values, device: torch.device) -> Tensor:
    """Return one value for those of several parts, by the reduction with which they were logged."""
    # 1. The values on one device, and the reduction of the first: all parts run the same call of `self.log`.
    tensors = [_on_device(logged.value, device) for logged, _ in values]
    first, _ = values[0]
    reduction = reduction_name(LogOptions(*first.arguments).reduce_fx)

    # 2. A mean, by the user's `batch_size` or the weights of the parts. Without any weight it is the first value.
    if reduction == "mean":
        weights = [weight if logged.batch_size is None else logged.batch_size for logged, weight in values]
        mean, _ = weighted_mean(tensors, weights, device)
        if mean is None:
            return tensors[0]
        return mean

    # 3. Any other reduction, which knows no weights.
    return combined(tensors, reduction)


def _on_device(value: Tensor, device: torch.device) -> Tensor:
    is_number = value.ndim == 0 and value.device.type == "cpu"
    if is_number and device.type != "cpu":
        # A copy from the host would wait for the device.
        return torch.full((), value.item(), dtype=value.dtype, device=device)
    return value.to(device)
