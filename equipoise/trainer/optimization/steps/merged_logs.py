"""Values that the parts of a batch logged, merged into one value each."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric

from equipoise.interop.lightning.self_log import LogOptions
from equipoise.parallel.batches.weighting import Weight, weighted_mean
from equipoise.trainer.logging.collection import Logged
from equipoise.trainer.logging.entry import combined, reduction_name
from equipoise.trainer.logging.logs import Logs

__all__ = ["log_merged"]


class _Key(NamedTuple):
    """A value that each part logs: the hook, the name, and the number among values of the same hook and name."""

    hook: str | None
    name: str
    number: int


class _PartValue(NamedTuple):
    logged: Logged
    weight: Weight


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
    # 1. The values of all parts, by what they are values of.
    values: dict[_Key, list[_PartValue]] = {}
    for part, weight in zip(parts, weights, strict=True):
        has_weight = isinstance(weight, Tensor) or weight != 0
        if not has_weight:
            continue
        for key, logged in _with_keys(part):
            values.setdefault(key, []).append(_PartValue(logged, weight))

    # 2. One value of each. For a value of any other type, `add` raises the error that it gets in any step.
    for key, part_values in values.items():
        first = part_values[0].logged
        merged = first.value
        size = first.batch_size
        if isinstance(merged, Metric):
            merged = original(merged)
        elif isinstance(merged, Tensor):
            merged = _reduced(part_values, device)
            size = _total_size(part_values)
        logs.add(key.hook, key.name, merged, first.arguments, size)


def _with_keys(part: Sequence[Logged]) -> Iterator[tuple[_Key, Logged]]:
    """Yield the values of a part with their keys. A hook may log a name several times."""
    counts: Counter[tuple[str | None, str]] = Counter()
    for logged in part:
        name_in_hook = (logged.hook, logged.name)
        number = counts[name_in_hook]
        yield _Key(logged.hook, logged.name, number), logged
        counts[name_in_hook] = number + 1


def _total_size(values: Sequence[_PartValue]) -> int | None:
    sizes = []
    for value in values:
        size = value.logged.batch_size
        if size is not None:
            sizes.append(size)
    if not sizes:
        return None
    return sum(sizes)


def _reduced(values: Sequence[_PartValue], device: torch.device) -> Tensor:
    """Return one value for those of several parts, by the reduction with which they were logged."""
    # 1. The values on one device, and the reduction of the first: all parts run the same call of `self.log`.
    tensors = []
    for value in values:
        tensor = _on_device(value.logged.value, device)
        tensors.append(tensor)
    first = values[0].logged
    options = LogOptions(*first.arguments)
    reduction = reduction_name(options.reduce_fx)

    # 2. A mean. If no part has a weight, there is none.
    if reduction == "mean":
        weights = [_weight_in_mean(value) for value in values]
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


def _weight_in_mean(value: _PartValue) -> Weight:
    """Return the weight of a part's value: the user's `batch_size`, or the weight of the part."""
    size = value.logged.batch_size
    if size is None:
        return value.weight
    return size
