"""The weighted loss: one rule for every way of computing a batch in parts.

A step yields a mean loss and its weight, the denominator of that mean: the number of samples, or whatever the user
says. The gradient of parts i is Σ wᵢgᵢ / Σ wᵢ. The arithmetic is part of the rule:

1. The backward of a part runs on `loss · (w / w_ref) / n`, where n is the nominal number of parts of the window and
   w_ref the weight of the first part ever seen; if that is a piece of a batch, of the batch, as far as its samples
   tell. A factor of 1 is left out.
2. At the window's end the gradients are multiplied by `n · w_ref / Σw`, unless that is 1.

So equal parts in full windows are `loss / n` to the bit, and large token counts do not overflow half precision.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["AccumulationWindow", "Weight", "weighted_mean"]

Weight = int | float | Tensor


class AccumulationWindow:
    """The parts whose gradients make one optimiser step.

    Args:
        parts: The nominal number of parts, n. Default: 1.

    Attributes:
        agree: Makes the reference weight, once, the same in all processes. None: there is one.
        piece: The samples of the next part and of the batch of which it is a piece; None if it is no piece.

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
        self.agree: Callable[[float], float] | None = None
        self.piece: tuple[int, int] | None = None
        self._reference: Weight | None = None
        self._equal = 0  # parts of the reference weight: counted, because 0.1 added ten times is not 1
        self._others: Weight = 0  # Σw of the other parts

    @property
    def total(self) -> Weight:
        """Σw of the parts so far, never rounded to the dtype of a weight."""
        return self._equal * (self._reference or 0) + self._others if self._equal else self._others

    def total_with(self, weight: Weight) -> Weight:
        """Σw as it will be once a part of this weight is added."""
        if isinstance(weight, Tensor):
            return self.total + weight.detach().to(_wide(weight))
        if isinstance(self._reference, Tensor) or weight != self._reference:
            return self.total + weight
        return (self._equal + 1) * self._reference + self._others

    @property
    def has_reference(self) -> bool:
        """Whether the reference weight is fixed."""
        return self._reference is not None

    @property
    def is_open(self) -> bool:
        """Whether parts were added since the last reset."""
        return bool(self._equal) or isinstance(self._others, Tensor) or bool(self._others)

    def add(self, weight: Weight) -> float | Tensor | None:
        """Counts a part of this weight and returns the factor of its loss; None stands for 1.

        A weight that is a tensor stays on its device: nothing is read from it.
        """
        if isinstance(weight, Tensor):
            weight = weight.detach().to(_wide(weight))
        reference = self._reference
        if reference is None:
            reference = self._reference = self._first(weight)
        if not isinstance(weight, Tensor) and not isinstance(reference, Tensor) and weight == reference:
            self._equal += 1
            return None if self.parts == 1 else 1 / self.parts
        self._others = self._others + weight
        return _divide(weight, reference) / self.parts

    def _first(self, weight: Weight) -> Weight:
        """The reference weight, by the first part. Pieces that counted for 1 might overflow float16."""
        if self.piece is not None:
            size, whole = self.piece
            weight = weight * whole / max(1, size)
        if self.agree is not None:  # a number of the host's: weights of other processes may be of another kind
            return self.agree(float(weight) or 1.0)
        return torch.where(weight > 0, weight, 1) if isinstance(weight, Tensor) else weight or 1

    def correction(self, total: Weight | None = None, processes: int = 1) -> float | Tensor | None:
        """The factor that turns the summed gradients into the weighted mean.

        None stands for 1, or for a window without weight.

        Args:
            total: Σw, where other processes add to it. Default: that of the parts seen here.
            processes: By how many the gradients were divided beforehand.
        """
        total, reference = self.total if total is None else total, self._reference
        if isinstance(reference, Tensor) and not isinstance(total, Tensor):
            total = torch.tensor(total, dtype=reference.dtype)
        if isinstance(total, Tensor):
            # Without any weight all gradients are 0 and stay 0.
            return torch.where(
                total > 0, _divide(self.parts * processes * (1 if reference is None else reference), total), 0
            )
        if reference is None or not total or total == self.parts * processes * reference:
            return None
        return self.parts * processes * reference / total

    def reset(self) -> None:
        """Begins the next window."""
        self._equal = 0
        self._others = 0

    def forget_reference(self) -> None:
        """The next part fixes the reference weight anew."""
        self._reference = None

    def state_dict(self) -> dict[str, Any]:
        """The reference weight, on which the bits of later steps depend, and the parts of an unfinished window."""
        return {"reference": _number(self._reference), "equal": self._equal, "others": _number(self._others)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` returned."""
        self._reference, self._equal, self._others = state["reference"], state["equal"], state["others"]


def weighted_mean(
    values: Sequence[Tensor | None], weights: Sequence[Weight], device: torch.device
) -> tuple[Tensor | None, Weight]:
    """The mean of parts that were computed apart, Σ wᵢvᵢ / Σ wᵢ, with its graph.

    Parts without value, and those whose weight is known to be 0, are left out.

    Args:
        values: A 0-dim tensor for each part, on any device; None where there is none.
        weights: Their weights.
        device: Where the mean is wanted.

    Returns:
        The mean, None if no part is left, and the total weight.

    Example:
        >>> mean, total = weighted_mean([torch.tensor(1.0), torch.tensor(4.0)], [2, 1], torch.device("cpu"))
        >>> mean.item(), total
        (2.0, 3)
    """
    parts = [
        (value, weight.detach().to(device, _wide(weight)) if isinstance(weight, Tensor) else weight)
        for value, weight in zip(values, weights, strict=True)
        if value is not None and (isinstance(weight, Tensor) or weight)
    ]
    if not parts:
        return None, 0
    total: Weight = sum((weight for _, weight in parts[1:]), parts[0][1])
    if isinstance(total, Tensor):
        # Without any weight the mean is 0, and so are its gradients.
        shares: list[Weight] = [torch.where(total > 0, weight / total, 0) for _, weight in parts]
    else:
        shares = [weight / total for _, weight in parts]
    terms = [
        value.to(device) * (share.to(value.dtype) if isinstance(share, Tensor) else share)
        for (value, _), share in zip(parts, shares, strict=True)
    ]
    mean = terms[0]
    for term in terms[1:]:
        mean = mean + term
    return mean, total


def _divide(weight: Weight, other: Weight) -> float | Tensor:
    """Divides with one rounding; torch would multiply a number by the reciprocal of a tensor."""
    if isinstance(other, Tensor) and not isinstance(weight, Tensor):
        weight = torch.tensor(weight, dtype=other.dtype)
    return weight / other


def _number(weight: Weight | None) -> int | float | None:
    return weight.item() if isinstance(weight, Tensor) else weight


def _wide(weight: Tensor) -> torch.dtype:
    """Float64 where the device has it: Σw must not be rounded (257 becomes 256 in bfloat16)."""
    return torch.float32 if weight.device.type == "mps" else torch.float64
