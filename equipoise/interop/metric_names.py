"""Attributes in which metrics keep states, counts and values, found by using a metric."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_sum

__all__ = ["MetricNames", "find_names"]


class MetricNames(NamedTuple):
    """Attributes of a metric, empty where there is none.

    Attributes:
        last: The value that `forward` has returned.
        computed: The value that `compute` has returned, until the next update.
        updates: The number of updates, which has no public setter.
        defaults: The dictionary of the values of states before the first update.
        reductions: The dictionary of functions that reduce states.
    """

    last: str
    computed: str
    updates: str
    defaults: str
    reductions: str


def find_names(base: type[Metric] = Metric) -> MetricNames:
    """Return the names of attributes, by what becomes of them when a metric is used.

    Args:
        base: The class of all metrics. Default: that of torchmetrics.

    Example:
        >>> all(find_names())
        True
    """

    class Probe(base):  # type: ignore[misc, valid-type]
        total: Tensor

        def __init__(self) -> None:
            # Other processes need not import this file at the same time.
            super().__init__(sync_on_compute=False)
            self.add_state("total", torch.zeros((), device="cpu"), dist_reduce_fx="sum")

        def update(self, value: Tensor) -> None:
            self.total += value

        def compute(self) -> Any:
            return self.total + 1

    probe = Probe()
    attributes = vars(probe)

    def name_where(holds: Callable[[Any], bool]) -> str:
        return next((name for name, value in attributes.items() if holds(value)), "")

    numbers = [name for name, value in attributes.items() if type(value) is int and value == 0]
    last = probe(torch.ones((), device="cpu"))
    computed = probe.compute()
    return MetricNames(
        last=name_where(lambda value: value is last),
        computed=name_where(lambda value: value is computed),
        updates=next((name for name in numbers if attributes[name] == 1), ""),
        defaults=name_where(lambda value: isinstance(value, dict) and isinstance(value.get("total"), Tensor)),
        reductions=name_where(lambda value: isinstance(value, dict) and value.get("total") is dim_zero_sum),
    )
