"""Gradients of all members: one loss for one backward, weights of each member, and clipping of each member."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from equipoise.extensions.ensemble.members.stacked_members import StackedParameter
from equipoise.parallel.batches.weighting import Weight
from equipoise.parallel.step_protocols import StepResult
from equipoise.precision import wide_dtype

__all__ = ["JoinedLoss", "WeightsOfMembers", "clip_by_norm", "clip_by_value"]

# What torch adds to a norm before it divides by it.
_EPSILON = 1e-6


class JoinedLoss(NamedTuple):
    """The losses of all members in a step.

    Attributes:
        loss: The sum of the weighted losses, with its graph; None if no member has a loss.
        weight: The weight of the step.
        mean: The mean of the losses, without its graph; None if no member has a loss.
    """

    loss: Tensor | None
    weight: Weight
    mean: Tensor | None


class WeightsOfMembers:
    """The weights of the members' losses in an accumulation window.

    The window of the trainer has one weight for each step: that of all members if theirs are equal, as numbers of
    samples are, else their mean. Then each member's loss is multiplied by its weight over the mean, and its gradients
    by the sum of the means over that of its weights.
    """

    def __init__(self) -> None:
        self._totals: list[Weight] = []
        self._common_total: Weight = 0
        self._are_equal = True

    def join(self, results: Sequence[StepResult]) -> JoinedLoss:
        """Return one loss whose backward gives each member its gradients.

        Args:
            results: The result of each member. One without a loss gets no gradient.
        """
        # 1. The weights, and that of the step.
        weights = [_weight_of(result) for result in results]
        common = weights[0]
        has_tensors = any(isinstance(weight, Tensor) for weight in weights)
        are_equal = not has_tensors and weights.count(common) == len(weights)
        if not are_equal:
            common = sum(weights) / len(weights)
            self._are_equal = False
        self._add(weights, common)

        # 2. The loss: one sum, whose backward is quicker than that of a chain of sums.
        losses = [result.loss for result in results if result.loss is not None]
        if not losses:
            return JoinedLoss(None, common, None)
        loss = torch.stack(losses).sum(0)
        mean = loss.detach() / len(losses)
        if not are_equal:
            pairs = zip(results, weights, strict=True)
            ratios = [_ratio(weight, common) for result, weight in pairs if result.loss is not None]
            loss = torch.stack([term * ratio for term, ratio in zip(losses, ratios, strict=True)]).sum(0)
        return JoinedLoss(loss, common, mean)

    def _add(self, weights: Sequence[Weight], common: Weight) -> None:
        totals = self._totals or [0] * len(weights)
        self._totals = [total + weight for total, weight in zip(totals, weights, strict=True)]
        self._common_total = self._common_total + common

    def correction(self) -> Tensor | None:
        """Return a factor for the gradients of each member, (members,); None stands for 1. The window ends."""
        factors = None
        if not self._are_equal:
            ratios = [_ratio(self._common_total, total) for total in self._totals]
            # Weights that are tensors lie on the device of the losses, numbers on the CPU.
            devices = [ratio.device for ratio in ratios if isinstance(ratio, Tensor)]
            device = max(devices, key=lambda device: device.type != "cpu", default=torch.device("cpu"))
            dtype = wide_dtype(device)
            factors = torch.stack([torch.as_tensor(ratio, dtype=dtype, device=device) for ratio in ratios])
        self._totals = []
        self._common_total = 0
        self._are_equal = True
        return factors

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of an open window, as numbers."""
        return {
            "totals": [float(total) for total in self._totals],
            "common": float(self._common_total),
            "equal": self._are_equal,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore sums that `state_dict` returned."""
        self._totals = list(state["totals"])
        self._common_total = state["common"]
        self._are_equal = state["equal"]


def _weight_of(result: StepResult) -> Weight:
    """Return the weight of a result, a tensor in a dtype in which sums of weights are exact; 0 without a loss."""
    weight = result.weight
    if result.loss is None or weight is None:
        return 0
    if isinstance(weight, Tensor):
        weight = weight.detach()
        return weight.to(wide_dtype(weight.device))
    return weight


def _ratio(weight: Weight, divisor: Weight) -> Weight:
    """Return the quotient of two weights; 0 where the divisor is 0."""
    if isinstance(divisor, Tensor):
        return torch.where(divisor > 0, weight / divisor, 0.0)
    if not divisor:
        return 0.0
    return weight / divisor


def clip_by_norm(parameters: Sequence[StackedParameter], largest: float) -> None:
    """Clip the gradients of each member by their norm, as `clip_grad_norm_` does for one.

    Args:
        parameters: The parameters.
        largest: The largest norm of the gradients of a member.
    """
    gradients = []
    for parameter in parameters:
        gradient = parameter.stacked.grad
        if gradient is not None:
            gradients.append(gradient)
    if not gradients:
        return
    # 1. The norms, (parameters, members).
    norms = []
    for gradient in gradients:
        norms.append(torch.linalg.vector_norm(gradient.reshape(len(gradient), -1), dim=1))
    norms_of_members = torch.linalg.vector_norm(torch.stack(norms), dim=0)

    # 2. A factor for each member.
    factors = largest / (norms_of_members + _EPSILON)
    factors = factors.clamp(max=1.0)
    for gradient in gradients:
        ones = [1] * (gradient.ndim - 1)
        gradient.mul_(factors.to(gradient.dtype).view(-1, *ones))


def clip_by_value(parameters: Sequence[StackedParameter], largest: float) -> None:
    """Clip each element of the gradients."""
    for parameter in parameters:
        gradient = parameter.stacked.grad
        if gradient is not None:
            gradient.clamp_(-largest, largest)
