"""One logged name: what is synchronised, and dtypes; `tests/parity/logs/test_logging.py` compares values."""

from typing import Any

import pytest
import torch
from torchmetrics import MeanMetric

from equipoise.interop.lightning.self_log import LogOptions
from equipoise.trainer.logging.entry import Entry, reduction_name


def entry(name: str = "loss", dataloader_idx: int | None = None, metric: Any = None, **options: Any) -> Entry:
    defaults = {"on_step": True, "on_epoch": True}
    return Entry("training_step", name, LogOptions(**{**defaults, **options}), dataloader_idx, metric)


def test_the_epochs_value_is_no_part_of_the_sum() -> None:
    """A caller may change what it reads."""
    reduced = entry(reduce_fx="sum")
    reduced.add(torch.tensor(1.0), 1)
    reduced.epoch().add_(100.0)
    reduced.add(torch.tensor(2.0), 1)
    assert reduced.epoch().item() == 3.0


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
def test_values_of_steps_are_synchronised_where_asked_for(options: dict[str, Any], syncs: bool) -> None:
    assert entry(**options).syncs_steps is syncs


@pytest.mark.parametrize(
    ("argument", "name"),
    [("AVG", "mean"), ("Max", "max"), (torch.sum, "sum"), (min, "min")],
    ids=["avg", "capital", "torch.sum", "min of Python"],
)
def test_names_of_reductions(argument: Any, name: str) -> None:
    assert reduction_name(argument) == name


def test_an_entry_keeps_the_default_dtype_of_its_first_hook() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        reduced = entry()
    finally:
        torch.set_default_dtype(torch.float32)
    reduced.add(torch.tensor(0.5), 3)
    assert reduced.epoch().dtype is torch.float64


def test_integers_are_converted_with_a_warning_for_the_first() -> None:
    reduced = entry()
    with pytest.warns(UserWarning, match=r"'loss' is of torch\.int64"):
        value = reduced.convert(torch.tensor(3))
    assert (value.dtype, value.item()) == (torch.float32, 3.0)
    reduced.add(value, 1)
    assert reduced.convert(torch.tensor(4)).dtype is torch.float32
