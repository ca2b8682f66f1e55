"""One logged name: its names, reductions of its values, what is saved of it."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torchmetrics import MeanMetric

from equipoise.interop.lightning.self_log import LogOptions
from equipoise.trainer.logging.entry import Entry, default_dtype, on_cpu, reduction_name


def entry(name: str = "loss", dataloader_idx: int | None = None, metric: Any = None, **options: Any) -> Entry:
    defaults = {"on_step": True, "on_epoch": True}
    return Entry("training_step", name, LogOptions(**{**defaults, **options}), dataloader_idx, metric)


def double(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


@pytest.fixture
def float64() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# Reductions


VALUES = st.lists(st.tuples(st.floats(-100, 100, allow_subnormal=False), st.integers(1, 9)), min_size=1, max_size=12)


@given(values=VALUES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "min", "max"])
def test_a_reduction_is_that_of_the_plain_numbers(reduction: str, values: list[tuple[float, int]]) -> None:
    reduced = entry(reduce_fx=reduction)
    reduced.dtype = torch.float64
    for value, size in values:
        reduced.add(double(value), size)
    numbers = [value for value, _ in values]
    samples = sum(size for _, size in values)
    expected = {
        "mean": math.fsum(value * size for value, size in values) / samples,
        "sum": math.fsum(numbers),
        "min": min(numbers),
        "max": max(numbers),
    }
    assert reduced.epoch(None).dtype is torch.float64
    assert reduced.epoch(None).item() == pytest.approx(expected[reduction], rel=1e-12, abs=1e-12)
    assert reduced.step.item() == numbers[-1]


@pytest.mark.parametrize("size", [1, 3, 4, 6, 64])
def test_a_mean_has_the_bits_of_a_product_and_a_sum(size: int) -> None:
    """Products with powers of two are added in one operation."""
    value, reduced = torch.tensor(0.1), entry()
    total = torch.zeros(())
    for _ in range(3):
        reduced.add(value, size)
        total = total + value * size
    assert reduced.total is not None
    assert reduced.total.item() == total.item()
    assert reduced.epoch(None).item() == (total / (3 * size)).item()


def test_the_epochs_value_is_no_part_of_the_sum() -> None:
    """A caller may change what it reads."""
    reduced = entry(reduce_fx="sum")
    reduced.add(torch.tensor(1.0), 1)
    reduced.epoch(None).add_(100.0)
    reduced.add(torch.tensor(2.0), 1)
    assert reduced.epoch(None).item() == 3.0


def test_values_of_steps_alone_have_no_sum() -> None:
    reduced = entry(on_epoch=False)
    reduced.add(torch.tensor(1.0), 4)
    assert reduced.total is None
    assert reduced.epoch(None) is None
    assert (reduced.step.item(), reduced.live) == (1.0, True)


@pytest.mark.parametrize("reduction", ["mean", "sum", "min", "max"])
def test_an_entry_that_forgot_is_as_new(reduction: str) -> None:
    reduced = entry(reduce_fx=reduction)
    reduced.add(torch.tensor(7.0), 2)
    reduced.forget()
    assert (reduced.live, reduced.step, reduced.epoch(None)) == (False, None, None)
    reduced.add(torch.tensor(3.0), 2)
    assert reduced.epoch(None).item() == 3.0


class Processes:
    """Two processes: this one, and one with values of its own.

    Args:
        another: The values of the other process, in the order in which they are reduced.
    """

    def __init__(self, *another: float) -> None:
        self.another = list(another)
        self.operations: list[str] = []

    def reduce(self, value: Tensor, reduce_op: str) -> Tensor:
        self.operations.append(reduce_op)
        both = torch.stack([value, torch.full_like(value, self.another.pop(0))])
        functions = {"sum": both.sum(0), "mean": both.mean(0), "min": both.amin(0), "max": both.amax(0)}
        return value.copy_(functions[reduce_op])


@pytest.mark.parametrize(("reduction", "expected"), [("sum", 7.0), ("min", 2.0), ("max", 5.0)])
def test_a_reduction_over_processes(reduction: str, expected: float) -> None:
    reduced, processes = entry(reduce_fx=reduction), Processes(5.0)
    reduced.add(torch.tensor(2.0), 3)
    assert reduced.epoch(processes.reduce).item() == expected
    assert processes.operations == [reduction]
    assert reduced.total is not None
    assert reduced.total.item() == 2.0, "the process keeps its own sum"


def test_a_mean_over_processes_has_the_weights_of_all() -> None:
    reduced, processes = entry(), Processes(60.0, 10)
    reduced.add(torch.tensor(2.0), 4)
    reduced.add(torch.tensor(6.0), 2)
    assert reduced.epoch(processes.reduce).item() == (2.0 * 4 + 6.0 * 2 + 60.0) / (4 + 2 + 10)
    assert processes.operations == ["sum", "sum"]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_rank_zero_only_is_not_reduced(reduction: str) -> None:
    reduced, processes = entry(reduce_fx=reduction, rank_zero_only=True), Processes()
    reduced.add(torch.tensor(2.0), 4)
    assert reduced.epoch(processes.reduce).item() == 2.0


@pytest.mark.parametrize(
    ("options", "syncs"),
    [
        ({"sync_dist": True}, True),
        ({}, False),
        ({"sync_dist": True, "on_step": False}, False),
        ({"sync_dist": True, "rank_zero_only": True}, False),
        ({"sync_dist": True, "metric": MeanMetric()}, False),
    ],
    ids=["sync_dist", "default", "epochs alone", "rank_zero_only", "a metric"],
)
def test_steps_that_are_synchronised(options: dict[str, Any], syncs: bool) -> None:
    assert entry(**options).syncs_steps is syncs


@pytest.mark.parametrize(
    ("argument", "name"),
    [("mean", "mean"), ("AVG", "mean"), ("Max", "max"), (torch.sum, "sum"), (torch.mean, "mean"), (min, "min")],
    ids=["mean", "avg", "capital", "torch.sum", "torch.mean", "min of Python"],
)
def test_names_of_reductions(argument: Any, name: str) -> None:
    assert reduction_name(argument) == name


@pytest.mark.parametrize("argument", ["median", torch.median, None], ids=["name", "function", "none"])
def test_other_reductions_are_refused(argument: Any) -> None:
    with pytest.raises(MisconfigurationException, match="only mean, sum, min and max"):
        reduction_name(argument)


# Precision


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
    ],
    ids=str,
)
def test_sums_have_float32_at_least(dtype: torch.dtype, expected: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    try:
        assert default_dtype() is expected
        assert entry().dtype is expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_an_entry_keeps_the_dtype_of_its_first_hook(float64: None) -> None:
    reduced = entry()
    torch.set_default_dtype(torch.float32)
    reduced.add(torch.tensor(0.5), 3)
    assert reduced.epoch(None).dtype is torch.float64


def test_integers_are_converted_with_a_warning_for_the_first() -> None:
    reduced = entry()
    with pytest.warns(UserWarning, match=r"'loss' is of torch\.int64"):
        value = reduced.convert(torch.tensor(3))
    assert (value.dtype, value.item()) == (torch.float32, 3.0)
    reduced.add(value, 1)
    assert reduced.convert(torch.tensor(4)).dtype is torch.float32


def test_half_precision_is_converted_silently() -> None:
    assert entry().convert(torch.tensor(0.5, dtype=torch.bfloat16)).dtype is torch.float32


# State


@pytest.mark.parametrize("reduction", ["mean", "sum", "min", "max"])
def test_an_entry_continues_a_saved_one(reduction: str) -> None:
    saved, uninterrupted = entry(reduce_fx=reduction, dataloader_idx=1), entry(reduce_fx=reduction, dataloader_idx=1)
    for value, size in ((0.1, 3), (0.7, 5)):
        for target in (saved, uninterrupted):
            target.add(torch.tensor(value), size)
    restored = Entry.from_state_dict(saved.state_dict({}), {})
    for target in (restored, uninterrupted):
        target.add(torch.tensor(0.3), 3)
    assert restored.key == uninterrupted.key
    assert restored.options == uninterrupted.options
    assert restored.epoch(None).item() == uninterrupted.epoch(None).item()
    assert (restored.live, restored.weight) == (True, uninterrupted.weight)


def test_a_metric_is_saved_by_its_name() -> None:
    metric, another = MeanMetric(), MeanMetric()
    state = entry(metric=metric).state_dict({id(metric): "mean", id(another): "another"})
    assert state["metric"] == "mean"
    assert Entry.from_state_dict(state, {"mean": another}).metric is another


def test_copies_on_the_cpu_have_no_graph() -> None:
    parameter = torch.ones((), requires_grad=True)
    copies = on_cpu({"tensor": parameter * 2, "number": 3, "text": "x"})
    assert copies == {"tensor": torch.tensor(2.0), "number": 3, "text": "x"}
    assert not copies["tensor"].requires_grad
