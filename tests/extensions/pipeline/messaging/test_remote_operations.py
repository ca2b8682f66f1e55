"""Operations on parameters of other processes: noted here and computed there, they are those on the values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_avg_fn, get_ema_multi_avg_fn

from equipoise.errors import StepError
from equipoise.extensions.pipeline.messaging.remote_operations import RemoteOperations, compute_operations
from equipoise.extensions.pipeline.messaging.remote_parameters import noted, send_elsewhere

CPU = torch.device("cpu")
COUNT = torch.tensor(2)

# Changes two pairs of an average and a weight, each of them in another process.
Change = Callable[[list[Tensor], list[Tensor]], Any]


def one_by_one(function: Callable[[Tensor, Tensor], Any]) -> Change:
    def change(averages: list[Tensor], weights: list[Tensor]) -> None:
        for average, weight in zip(averages, weights, strict=True):
            function(average.detach(), weight.detach().to(average.device))

    return change


def swap(average: Tensor, weight: Tensor) -> None:
    kept = average.data.clone()
    average.data.copy_(weight.data)
    weight.data.copy_(kept)


def of_differences(averages: list[Tensor], weights: list[Tensor]) -> None:
    torch._foreach_add_(averages, torch._foreach_sub(weights, averages), alpha=0.25)


def in_another_dtype(average: Tensor, weight: Tensor) -> None:
    average.copy_((weight.to(torch.float32) * 2).to(average.dtype))


def with_views_of_results(average: Tensor, weight: Tensor) -> None:
    average.data.copy_(torch.where(weight > average, (weight * 2).detach(), weight**2).data)


CHANGES: dict[str, Change] = {
    "interpolation": one_by_one(lambda average, weight: average.lerp_(weight, 0.25)),
    "a sum": one_by_one(lambda average, weight: average.copy_(get_ema_avg_fn(0.75)(average, weight, COUNT))),
    "an exchange": one_by_one(swap),
    "views of results": one_by_one(with_views_of_results),
    "another dtype": one_by_one(in_another_dtype),
    "an argument by name": one_by_one(lambda average, weight: torch.add(average, weight, alpha=2, out=None).sub_(1)),
    "all exponential": lambda averages, weights: get_ema_multi_avg_fn(0.75)(averages, weights, COUNT),
    "differences": of_differences,
}


def values() -> list[Tensor]:
    """Return two averages and two weights."""
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(3, size, generator=draw, dtype=torch.float64) for size in (2, 4, 2, 4)]


class Elsewhere:
    """Parameters in the processes of other stages: one pair in that of stage 0, one in those of stages 0 and 1."""

    def __init__(self) -> None:
        self.parameters = [nn.Parameter(value) for value in values()]
        for parameter in self.parameters:
            send_elsewhere(parameter, parameter.detach())
        self.stores = {stage: dict(enumerate(values())) for stage in (0, 1)}
        self.results: dict[int, dict[int, Tensor]] = {0: {}, 1: {}}
        self.operations = RemoteOperations(self.key_of, lambda key: (0, 1) if key % 2 else (0,))

    def key_of(self, tensor: Tensor) -> int:
        return next(key for key, parameter in enumerate(self.parameters) if parameter is tensor)

    def compute(self) -> None:
        for stage, operations in self.operations.take().items():
            compute_operations(operations, self.stores[stage].__getitem__, self.results[stage], CPU)


@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_results_are_those_of_the_values(name: str) -> None:
    expected = values()
    CHANGES[name](expected[:2], expected[2:])
    elsewhere = Elsewhere()
    with noted(elsewhere.operations):
        CHANGES[name](list(elsewhere.parameters[:2]), list(elsewhere.parameters[2:]))
    elsewhere.compute()
    for key, value in enumerate(expected):
        assert torch.equal(value, elsewhere.stores[0][key])
        # Who has only the second pair computes that.
        assert torch.equal(value if key % 2 else values()[key], elsewhere.stores[1][key])


@torch.no_grad()
def test_a_copy_on_another_device() -> None:
    """The device "meta" stands for that of this process."""
    elsewhere = Elsewhere()
    average, weight = elsewhere.parameters[0], elsewhere.parameters[2]
    with noted(elsewhere.operations):
        moved = weight.to(torch.device("meta")).mul_(2)
        average.lerp_(moved.to(CPU), 0.25)
    elsewhere.compute()
    assert moved.device.type == "meta"
    assert torch.equal(elsewhere.stores[0][2], values()[2])
    assert torch.equal(elsewhere.stores[0][0], values()[0].lerp(values()[2] * 2, 0.25))


@torch.no_grad()
def test_values_of_this_process_are_sent() -> None:
    """Such as weights that a callback has kept from before they moved."""
    elsewhere = Elsewhere()
    kept = torch.ones(3, 2, dtype=torch.float64)
    with noted(elsewhere.operations):
        elsewhere.parameters[0].lerp_(kept, 0.25)
        kept.zero_()
    elsewhere.compute()
    assert torch.equal(elsewhere.stores[0][0], values()[0].lerp(torch.ones(3, 2, dtype=torch.float64), 0.25))


@torch.no_grad()
def test_a_result_lasts_as_long_as_it_is_referred_to() -> None:
    """Such as weights that a callback keeps from one hook to another."""
    elsewhere = Elsewhere()
    average, weight = elsewhere.parameters[0], elsewhere.parameters[2]
    with noted(elsewhere.operations):
        kept = (average.detach() * 2).detach()
        CHANGES["a sum"](list(elsewhere.parameters[:2]), list(elsewhere.parameters[2:]))
    elsewhere.compute()
    assert [value.tolist() for value in elsewhere.results[0].values()] == [(values()[0] * 2).tolist()]
    with noted(elsewhere.operations):
        weight.copy_(kept)
    del kept
    elsewhere.compute()
    assert torch.equal(elsewhere.stores[0][2], values()[0] * 2)
    assert not elsewhere.results[0]


@torch.no_grad()
def test_a_result_of_another_run_is_refused() -> None:
    before, elsewhere = Elsewhere(), Elsewhere()
    with noted(before.operations):
        kept = before.parameters[0] * 2
    with noted(elsewhere.operations), pytest.raises(StepError, match="in another process"):
        elsewhere.parameters[0].copy_(kept)


@pytest.mark.parametrize(
    "read",
    [
        lambda one, other: one.sum().item(),
        lambda one, other: one.add(other),
        lambda one, other: one.data.T.mul(2),
        lambda one, other: torch.zeros(3, 2, dtype=torch.float64).copy_(one),
        lambda one, other: torch.add(one, 1, out=torch.zeros(3, 2, dtype=torch.float64)),
        lambda one, other: torch._foreach_add([one], [other]),
    ],
    ids=["a number", "another process", "a view", "a change here", "a result here", "lists"],
)
def test_values_are_refused(read: Callable[[Tensor, Tensor], Any]) -> None:
    elsewhere = Elsewhere()
    with noted(elsewhere.operations), torch.no_grad(), pytest.raises(StepError, match="in another process"):
        read(elsewhere.parameters[0], elsewhere.parameters[1])


@torch.no_grad()
def test_lists_with_tensors_of_this_process() -> None:
    """As buffers are, whose averages are computed here."""
    elsewhere = Elsewhere()
    here = [torch.ones(2), torch.full((2,), 3.0)]
    with noted(elsewhere.operations):
        torch._foreach_lerp_([elsewhere.parameters[0], here[0]], [elsewhere.parameters[2], here[1]], 0.5)
    elsewhere.compute()
    assert torch.equal(elsewhere.stores[0][0], values()[0].lerp(values()[2], 0.5))
    assert here[0].tolist() == [2.0, 2.0]
