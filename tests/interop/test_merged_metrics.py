"""States of metrics are merged: of the parts of a batch, of several processes, and of checkpoints."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.regression import PearsonCorrCoef

from equipoise import ConfigurationError
from equipoise.interop.merged_metrics import join_metrics, merge_metric_states, merge_saved_states, states_to_send
from equipoise.interop.metrics import load_metric_states, metric_states, take_metric_state
from tests.support.equality import assert_equal

NUMBERS: dict[str, tuple[float, Any]] = {
    "total": (0.0, "sum"),
    "mean": (0.0, "mean"),
    "smallest": (torch.inf, "min"),
    "largest": (-torch.inf, "max"),
    "product": (1.0, lambda each: each.prod(0)),
}


class States(Metric):
    """Has a state of every kind; its mean is that of the means of all updates.

    Args:
        separate: Whether it also has a tensor without a reduction. Default: False.
    """

    full_state_update = False

    def __init__(self, separate: bool = False) -> None:
        super().__init__()
        for name, (default, reduction) in NUMBERS.items():
            self.add_state(name, torch.tensor(default, dtype=torch.float64), dist_reduce_fx=reduction)
        self.add_state("joined", torch.zeros(0, dtype=torch.float64), dist_reduce_fx="cat")
        self.add_state("items", [], dist_reduce_fx="cat")
        self.add_state("unreduced", [], dist_reduce_fx=None)
        if separate:
            self.add_state("apart", torch.zeros(()), dist_reduce_fx=None)

    def update(self, x: Tensor) -> None:
        self.mean = self.mean + (x.mean() - self.mean) / self.update_count
        self.total = self.total + x.sum()
        self.smallest, self.largest = torch.minimum(self.smallest, x.min()), torch.maximum(self.largest, x.max())
        self.product = self.product * x.prod()
        self.joined = torch.cat([self.joined, x])
        self.items.append(x)
        self.unreduced.append(x)

    def compute(self) -> Tensor:
        return self.total


def values(metric: Metric) -> dict[str, Any]:
    return {name: torch.cat(s) if isinstance(s, list) and s else s for name, s in metric.metric_state.items()}


def update_in_parts(metric: Metric, parts: list[Tensor], *, own: bool = True, call: bool = False) -> None:
    """Lets a metric see a batch whose parts its copies see.

    Args:
        metric: The metric.
        parts: What each part is updated with.
        own: Whether the metric itself sees the first part.
        call: Whether `forward` is called.
    """
    before = take_metric_state(metric)
    copies = [metric if own and not index else copy.deepcopy(metric) for index in range(len(parts))]
    for each, part in zip(copies, parts, strict=True):
        each(part) if call else each.update(part)
    merge_metric_states([metric], [before], [copies], [len(part) for part in parts])


# Parts of a batch


@settings(deadline=None)
@given(
    batches=st.lists(
        st.lists(st.lists(st.floats(-3, 3), min_size=1, max_size=3), min_size=1, max_size=4), min_size=1, max_size=3
    ),
    own=st.booleans(),
    call=st.booleans(),
)
def test_metrics_in_parts_end_as_those_of_the_whole(batches: list[list[list[float]]], own: bool, call: bool) -> None:
    metric, expected = States(), States()
    for batch in batches:
        parts = [torch.tensor(part, dtype=torch.float64) for part in batch]
        update_in_parts(metric, parts, own=own, call=call)
        expected.update(torch.cat(parts))
        # Torchmetrics' own forward rounds means to float32.
        assert_equal(values(expected), values(metric), 1e-6 if call else 1e-12)
        assert metric.update_count == expected.update_count
        last = metric._forward_cache
        assert last is None if not call else last == pytest.approx(torch.cat(parts).sum().item())
    assert metric.compute() == pytest.approx(expected.compute().item())


def test_states_that_are_numbers_are_joined() -> None:
    class Last(Metric):
        full_state_update = False

        def __init__(self) -> None:
            super().__init__()
            self.add_state("last", torch.tensor(0.0), dist_reduce_fx="cat")

        def update(self, x: Tensor) -> None:
            self.last = x.sum()

        def compute(self) -> Tensor:
            return self.last

    metric = Last()
    update_in_parts(metric, [torch.ones(1), torch.ones(2)])
    assert metric.last.tolist() == [1, 2]


def test_parts_that_were_not_updated_do_not_count() -> None:
    metric = States()
    metric.update(torch.tensor([1.0]))
    before = take_metric_state(metric)
    copies = [metric, copy.deepcopy(metric), copy.deepcopy(metric)]
    copies[2].update(torch.tensor([5.0, 7.0]))
    merge_metric_states([metric], [before], [copies], [1, 1, 2])
    assert (metric.total, metric.smallest, metric.mean, metric.update_count) == (13, 1, 3.5, 2)


def test_parts_of_other_devices_come_home() -> None:
    """The meta device stands for any other; here it is home."""
    metric = States().to("meta")
    before = take_metric_state(metric)
    parts = [States(), States()]
    for part in parts:
        part.update(torch.ones(2))
    merge_metric_states([metric], [before], [parts], [2, 2])
    for state in metric.metric_state.values():
        assert {each.device.type for each in (state if isinstance(state, list) else [state])} == {"meta"}


# Several processes


def joined(metrics: list[Any]) -> Any:
    """The first one, holding what all have gathered."""
    join_metrics(metrics[0], [states_to_send(each) for each in metrics])
    return metrics[0]


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(-3, 3), min_size=1, max_size=4), max_size=7), st.integers(1, 4))
def test_metrics_of_processes_end_as_that_of_one(batches: list[list[float]], processes: int) -> None:
    """Batches that were dealt out in turn; some processes may have none."""
    updates = [torch.tensor(batch, dtype=torch.float64) for batch in batches]
    whole, parts = States(), [States() for _ in range(processes)]
    for index, update in enumerate(updates):
        whole.update(update)
        parts[index % processes].update(update)
    together = joined(parts)
    assert together.update_count == len(batches)
    for metric in (whole, together):
        metric.joined = metric.joined.sort()[0]
    for name in [*NUMBERS, "joined"]:
        assert_equal(getattr(whole, name), getattr(together, name), 1e-12)
    # In the order of the batches.
    assert_equal([whole.items, whole.unreduced], [together.items, together.unreduced])


def test_tensors_without_a_reduction_are_put_together_by_the_metric() -> None:
    x, y = torch.randn(2, 12, generator=torch.Generator().manual_seed(1))
    whole, parts = PearsonCorrCoef(), [PearsonCorrCoef() for _ in range(3)]
    whole.update(x, y)
    for part, rows in ((parts[0], slice(5)), (parts[2], slice(5, 12))):
        part.update(x[rows], y[rows])
    torch.testing.assert_close(joined(parts).compute(), whole.compute(), rtol=1e-5, atol=1e-6)


def test_lists_of_unequal_lengths_stay_as_they_are() -> None:
    """Pairs of two lists could not be found if the items of each were put in turn."""

    class Two(Metric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("one", [], dist_reduce_fx=None)
            self.add_state("pairs", [], dist_reduce_fx=None)

        def update(self, x: float) -> None:
            self.one.append(torch.tensor(x))
            self.pairs += [torch.tensor(x), torch.tensor(-x)]

        def compute(self) -> Tensor:
            return torch.stack([*self.one, *self.pairs])

    parts = [Two(), Two()]
    for index, part in enumerate(parts):
        part.update(1.0 + index)
        part.update(3.0 + index)
    assert joined(parts).compute().tolist() == [1, 3, 2, 4, 1, -1, 3, -3, 2, -2, 4, -4]


# Checkpoints, for another number of processes


def saved_by(values_of_processes: list[list[float]], **options: Any) -> list[dict[str, Any]]:
    """Return the answer of `metric_states` in each process."""
    states = []
    for values in values_of_processes:
        module = nn.ModuleDict({"metric": States(**options)})
        for value in values:
            module["metric"].update(torch.tensor([value]))
        states.append(metric_states(module))
    return states


@pytest.mark.parametrize("count", [1, 3])
def test_states_of_each_reduction_are_merged_for_other_processes(count: int) -> None:
    saved = saved_by([[1.0, 2.0], [5.0, 8.0], []])
    metrics = []
    for rank in range(count):
        module = nn.ModuleDict({"metric": States()})
        load_metric_states(module, merge_saved_states(module, saved, rank, count))
        metrics.append(module["metric"])
    assert sum(float(metric.total) for metric in metrics) == 16
    assert max(float(metric.largest) for metric in metrics) == 8
    # A mean is that of all processes in each of them, and continues with as many batches as there were.
    assert [float(metric.mean) for metric in metrics] == [4.0] * count
    assert [metric.update_count for metric in metrics] == [2] * count
    assert [float(value) for metric in metrics for value in metric.items] == [1, 5, 2, 8]


def test_what_has_no_reduction_stays_apart() -> None:
    saved = saved_by([[1.0], [5.0]], separate=True)
    module = nn.ModuleDict({"metric": States(separate=True)})
    merged = [merge_saved_states(module, saved, rank, 3)["metric"] for rank in range(3)]
    assert [float(each["state"]["total"]) for each in merged] == [1, 5, 0]
    assert [each["count"] for each in merged] == [1, 1, 0]
    with pytest.raises(ConfigurationError, match=r"the metric 'metric' \(States\) of 2 processes"):
        merge_saved_states(module, saved, 0, 1)
    # That of a validation begins anew.
    assert merge_saved_states(module, saved, 0, 1, left_out=["metric"]) == {}
