"""The weighted loss: the factor of each part's loss, and the correction that makes summed gradients their mean.

A step yields a mean loss and its weight, the denominator of that mean: the number of samples, or whatever the user
says. The gradient of parts i is Σ wᵢgᵢ / Σ wᵢ. The arithmetic is part of the rule:

1. The backward of a part runs on `loss · (w / w_ref) / n`. Here n is the nominal number of parts of the window, and
   w_ref the weight of the first part. If the first part is a micro-batch, w_ref is the weight of its batch, estimated
   from the numbers of samples. A factor of 1 is left out.
2. At the window's end the gradients are multiplied by `n · w_ref / Σw`, unless that is 1.

So equal parts in full windows are `loss / n` to the bit, and large token counts do not overflow half precision.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from equipoise.precision import wide_dtype

__all__ = ["AccumulationWindow", "Weight", "weighted_mean"]

Weight = int | float | Tensor


class AccumulationWindow:
    """The parts whose gradients one optimiser step uses.

    Args:
        parts: The nominal number of parts, n. Default: 1.

    Attributes:
        sync_reference: Function that makes the reference weight the same in all processes. The window calls it once.
            None: there is one process.
        micro_batch: Numbers of samples of the next part and of its batch, if the next part is a micro-batch. None: it
            is a batch.

    Example:
        >>> window = AccumulationWindow(parts=2)
        >>> window.add(4), window.add(4), window.correction()
        (0.5, 0.5, None)
        >>> window.reset()
        >>> window.add(4), window.add(2), window.correction()
        (0.5, 0.25, 1.3333333333333333)
    """

    def __init__(self, parts: int = 1) -> None:
        self.parts = parts
        self.sync_reference: Callable[[float], float] | None = None
        self.micro_batch: tuple[int, int] | None = None
        self._reference: Weight | None = None
        # Number of parts of the reference weight. It is counted, because 0.1 added ten times is not 1.
        self._equal_parts = 0
        # Σw of all other parts.
        self._unequal_weight: Weight = 0

    @property
    def total(self) -> Weight:
        """Σw of the parts so far, never rounded to the dtype of a weight."""
        if not self._equal_parts:
            return self._unequal_weight
        equal_weight = self._equal_parts * (self._reference or 0)
        return equal_weight + self._unequal_weight

    def total_with(self, weight: Weight) -> Weight:
        """Return Σw of the parts so far and of one more part of this weight."""
        if isinstance(weight, Tensor):
            weight = weight.detach().to(wide_dtype(weight.device))
            return self.total + weight
        reference = self._reference
        if isinstance(reference, Tensor) or weight != reference:
            return self.total + weight
        equal_weight = (self._equal_parts + 1) * reference
        return equal_weight + self._unequal_weight

    @property
    def has_reference(self) -> bool:
        """True if the reference weight is fixed."""
        return self._reference is not None

    @property
    def is_open(self) -> bool:
        """True if parts were added since the last reset."""
        if self._equal_parts:
            return True
        # A tensor counts as a part without being read: that would synchronise its device.
        if isinstance(self._unequal_weight, Tensor):
            return True
        return self._unequal_weight != 0

    def add(self, weight: Weight) -> float | Tensor | None:
        """Count a part of this weight and return the factor of its loss.

        Args:
            weight: The weight of the part. A tensor stays on its device: nothing is read from it.

        Returns:
            The factor. None stands for 1.
        """
        if isinstance(weight, Tensor):
            weight = weight.detach().to(wide_dtype(weight.device))
        reference = self._reference
        if reference is None:
            reference = self._first_reference(weight)
            self._reference = reference
        # Tensors are not compared: that would synchronise their device.
        if isinstance(weight, Tensor) or isinstance(reference, Tensor) or weight != reference:
            self._unequal_weight = self._unequal_weight + weight
            factor = _divide(weight, reference)
            return factor / self.parts
        self._equal_parts += 1
        if self.parts == 1:
            return None
        return 1 / self.parts

    def _first_reference(self, weight: Weight) -> Weight:
        """Return the reference weight that follows from the weight of the first part."""
        # A micro-batch as the reference would give other parts factors over 1, which might overflow float16.
        if self.micro_batch is not None:
            size, batch_size = self.micro_batch
            size = max(1, size)
            weight = weight * batch_size / size
        # Processes exchange a Python number: the weights of other processes may be of another type.
        if self.sync_reference is not None:
            return self.sync_reference(float(weight) or 1.0)
        # A reference of 0 would divide by 0.
        if isinstance(weight, Tensor):
            return torch.where(weight > 0, weight, 1)
        return weight or 1

    def correction(self, total: Weight | None = None, processes: int = 1) -> float | Tensor | None:
        """Return the factor that turns the summed gradients into the weighted mean.

        Args:
            total: Σw, if other processes add to it. Default: that of the parts added here.
            processes: Number by which the gradients were divided beforehand. Default: 1.

        Returns:
            The factor. None stands for 1, and for a window without weight.
        """
        if total is None:
            total = self.total
        parts = self.parts * processes
        reference = self._reference
        if isinstance(reference, Tensor) and not isinstance(total, Tensor):
            total = torch.tensor(total, dtype=reference.dtype)
        if isinstance(total, Tensor):
            nominal: Weight = parts
            if reference is not None:
                nominal = parts * reference
            # Without any weight all gradients are 0 and stay 0.
            return torch.where(total > 0, _divide(nominal, total), 0)
        if reference is None or not total:
            return None
        nominal = parts * reference
        if total == nominal:
            return None
        return nominal / total

    def reset(self) -> None:
        """Begin the next window."""
        self._equal_parts = 0
        self._unequal_weight = 0

    def forget_reference(self) -> None:
        """Let the next part fix the reference weight anew."""
        self._reference = None

    def state_dict(self) -> dict[str, Any]:
        """Return the reference weight, on which the bits of later steps depend, and the sums of an open window."""
        return {
            "reference": _number(self._reference),
            "equal": self._equal_parts,
            "others": _number(self._unequal_weight),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self._reference = state["reference"]
        self._equal_parts = state["equal"]
        self._unequal_weight = state["others"]


def weighted_mean(
    values: Sequence[Tensor | None],
    weights: Sequence[Weight],
    device: torch.device,
) -> tuple[Tensor | None, Weight]:
    """Return the mean of parts that were computed apart, Σ wᵢvᵢ / Σ wᵢ, with its graph.

    Parts without a value, and those whose weight is the number 0, are left out.

    Args:
        values: A 0-dim tensor for each part, on any device. None: the part has no value.
        weights: The weight of each part.
        device: The device of the result.

    Returns:
        The mean, or None if no part is left, and the total weight.

    Example:
        >>> mean, total = weighted_mean([torch.tensor(1.0), torch.tensor(4.0)], [2, 1], torch.device("cpu"))
        >>> mean.item(), total
        (2.0, 3)
    """
    # 1. The parts that count. Weights that are tensors come to the device, in a wide dtype.
    parts: list[tuple[Tensor, Weight]] = []
    pairs = zip(values, weights, strict=True)
    for value, weight in pairs:
        if value is None:
            continue
        if isinstance(weight, Tensor):
            weight = weight.detach().to(device, wide_dtype(weight.device))
            parts.append((value, weight))
        elif weight:
            parts.append((value, weight))
    if not parts:
        return None, 0

    # 2. The total weight.
    total = parts[0][1]
    for _, weight in parts[1:]:
        total = total + weight

    # 3. The sum of all values, each multiplied by its share of the total.
    mean: Tensor | None = None
    for value, weight in parts:
        term = value.to(device) * _share(weight, total, value.dtype)
        if mean is None:
            mean = term
        else:
            mean = mean + term
    return mean, total


def _share(weight: Weight, total: Weight, dtype: torch.dtype) -> Weight:
    """Return the weight divided by the total. A tensor gets the dtype of the value that it multiplies."""
    if isinstance(total, Tensor):
        # Without any weight the mean is 0, and so are its gradients.
        share = weight / total
        share = torch.where(total > 0, share, 0)
        return share.to(dtype)
    return weight / total


def _divide(weight: Weight, divisor: Weight) -> float | Tensor:
    """Divide with one rounding. Torch would multiply a number by the reciprocal of a tensor."""
    if isinstance(divisor, Tensor) and not isinstance(weight, Tensor):
        weight = torch.tensor(weight, dtype=divisor.dtype)
    return weight / divisor


def _number(weight: Weight | None) -> int | float | None:
    if isinstance(weight, Tensor):
        return weight.item()
    return weight
