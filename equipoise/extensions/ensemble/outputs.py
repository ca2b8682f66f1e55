"""Results of all members as one: averaged outputs, and logged values with their means."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from equipoise.errors import StepError
from equipoise.interop.merged_metrics import MeanOfMetrics
from equipoise.parallel.step_protocols import PartwiseStep, StepResult
from equipoise.tree import items_of, rebuild

__all__ = ["MemberLogs", "averaged"]


class _CannotAverage(Exception):
    """Outputs that have no mean."""


def averaged(outputs: Sequence[Any]) -> Any:
    """Return the mean of the members' outputs, or the list of them if they have none.

    Floating-point tensors and numbers are averaged. Anything else must be the same for all members, as labels and names
    are.

    Args:
        outputs: The output of each member.

    Example:
        >>> averaged([{"p": 0.25, "name": "a"}, {"p": 0.75, "name": "a"}])
        {'p': 0.5, 'name': 'a'}
        >>> averaged([["cat"], ["dog"]])
        [['cat'], ['dog']]
    """
    try:
        return _mean(outputs)
    except _CannotAverage:
        return list(outputs)


def _mean(values: Sequence[Any]) -> Any:
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        raise _CannotAverage
    if isinstance(first, Tensor):
        return _mean_of_tensors(values)
    if isinstance(first, float):
        return sum(values) / len(values)
    items = items_of(first)
    if items is None:
        if any(value != first for value in values):
            raise _CannotAverage
        return first
    # A container: its items are averaged one by one.
    rows = []
    for value in values:
        items = items_of(value) or ()
        rows.append(list(items))
    lengths = set(map(len, rows))
    if len(lengths) > 1:
        raise _CannotAverage
    return rebuild(first, [_mean(column) for column in zip(*rows, strict=True)])


def _mean_of_tensors(tensors: Sequence[Tensor]) -> Tensor:
    first = tensors[0]
    if any(tensor.shape != first.shape for tensor in tensors):
        raise _CannotAverage
    if first.is_floating_point() or first.is_complex():
        return torch.stack(list(tensors)).mean(0)
    if not all(torch.equal(tensor, first) for tensor in tensors):
        raise _CannotAverage
    return first


class MemberLogs:
    """Logs the values of all members: their mean under the user's name, and in evaluations each of them.

    Args:
        metrics: The metrics of the module, each with its copies in all members, the first member's first.
        device: The device of the means.
    """

    def __init__(self, metrics: Sequence[Sequence[Metric]], device: torch.device) -> None:
        self._device = device
        # The mean of a metric over the members, by the identity of each member's.
        self._means: dict[int, Metric] = {}
        for copies in metrics:
            mean = MeanOfMetrics(copies)
            for metric in copies:
                self._means[id(metric)] = mean

    def log(self, step: PartwiseStep, results: Sequence[StepResult], *, by_member: bool) -> None:
        """Log what all members have logged in a step.

        Args:
            step: The step.
            results: The result of each member.
            by_member: Whether to log the value of each member, too, as `name/member_0`.

        Raises:
            StepError: If a metric is the same for all members.
        """
        logged = [result.logged for result in results]
        if not any(logged):
            return
        step.log_together(logged, [1] * len(logged), self._device, original=self._mean_of)
        if not by_member:
            return
        # In evaluations users compare the members.
        for member, values in enumerate(logged):
            named = [_of_member(value, member) for value in values]
            step.log_together([named], [1], self._device, original=_itself)

    def _mean_of(self, metric: Metric) -> Metric:
        if id(metric) not in self._means:
            raise StepError(
                f"A step logs a {type(metric).__name__} that was no part of the module when its members were made, so"
                " that all members of the ensemble update the same one. Register it in `__init__`, as an attribute or"
                " in an nn.ModuleList or nn.ModuleDict."
            )
        return self._means[id(metric)]


def _itself(metric: Metric) -> Metric:
    return metric


def _of_member(logged: Any, member: int) -> Any:
    """Return a logged value under the name of a member. A progress bar shows the mean alone."""
    _, *options = logged.arguments
    return logged._replace(name=f"{logged.name}/member_{member}", arguments=(False, *options))
