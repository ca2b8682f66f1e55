"""States of metrics in a checkpoint, for another number of processes: together they compute what they computed."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from equipoise import ConfigurationError
from equipoise.interop.merged_metrics import merge_saved_states
from equipoise.interop.metrics import load_metric_states, metric_states


class AllKinds(Metric):
    """A state of each kind of reduction."""

    def __init__(self, separate: bool = False) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("largest", torch.tensor(-torch.inf), dist_reduce_fx="max")
        self.add_state("mean", torch.zeros(()), dist_reduce_fx="mean")
        self.add_state("values", [], dist_reduce_fx="cat")
        if separate:
            self.add_state("apart", torch.zeros(()), dist_reduce_fx=None)

    def update(self, value: Tensor) -> None:
        self.total += value
        self.largest = torch.maximum(self.largest, value)
        self.mean += (value - self.mean) / self.update_count
        self.values.append(value)

    def compute(self) -> Tensor:
        return self.total


def saved_by(values_of_processes: list[list[float]], **options: Any) -> list[dict[str, Any]]:
    """Return the answer of `metric_states` in each process."""
    states = []
    for values in values_of_processes:
        module = nn.ModuleDict({"metric": AllKinds(**options)})
        for value in values:
            module["metric"].update(torch.tensor(value))
        states.append(metric_states(module))
    return states


@pytest.mark.parametrize("count", [1, 2, 3])
def test_states_of_each_reduction_are_merged_for_other_processes(count: int) -> None:
    saved = saved_by([[1.0, 2.0], [5.0, 8.0], []])
    metrics = []
    for rank in range(count):
        module = nn.ModuleDict({"metric": AllKinds()})
        load_metric_states(module, merge_saved_states(module, saved, rank, count))
        metrics.append(module["metric"])
    assert sum(float(metric.total) for metric in metrics) == 16
    assert max(float(metric.largest) for metric in metrics) == 8
    # A mean is that of all processes in each of them, and continues with as many batches as there were.
    assert [float(metric.mean) for metric in metrics] == [4.0] * count
    assert [metric.update_count for metric in metrics] == [2] * count
    assert [float(value) for metric in metrics for value in metric.values] == [1, 5, 2, 8]


def test_what_has_no_reduction_stays_apart() -> None:
    saved = saved_by([[1.0], [5.0]], separate=True)
    module = nn.ModuleDict({"metric": AllKinds(separate=True)})
    merged = [merge_saved_states(module, saved, rank, 3)["metric"] for rank in range(3)]
    assert [float(each["state"]["total"]) for each in merged] == [1, 5, 0]
    assert [each["count"] for each in merged] == [1, 1, 0]
    with pytest.raises(ConfigurationError, match=r"the metric 'metric' \(AllKinds\) of 2 processes"):
        merge_saved_states(module, saved, 0, 1)
    # That of a validation begins anew.
    assert merge_saved_states(module, saved, 0, 1, left_out=["metric"]) == {}
