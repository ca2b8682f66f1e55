"""The inner workings of torch and torchmetrics that replicas rely on are still there, and do what is relied upon."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.compile import from_compiled
from torch import Tensor, nn
from torch.utils.data import default_collate
from torch.utils.data._utils import collate
from torchmetrics import Metric
from torchmetrics.regression import MeanSquaredError, PearsonCorrCoef

from equipoise.interop.distributed.processes import collective_count
from equipoise.interop.merged_metrics import join_metrics, merge_metric_states, states_to_send
from equipoise.interop.metrics import restore_metric_state, take_metric_state
from equipoise.interop.torch.loaders import collates_tensors_by_stacking
from equipoise.interop.torch.modules import (
    References,
    has_gradient_hooks,
    hook_registries_of,
    is_compiled,
    versions,
)
from tests.support.equality import assert_equal

# Modules


def test_all_hooks_of_a_module_are_in_its_registries():
    module = nn.Linear(2, 2)
    assert [len(registry) for registry in hook_registries_of(module)] == [0] * 7
    module.register_forward_hook(lambda *args: None, with_kwargs=True, always_call=True)
    module.register_forward_pre_hook(lambda *args: None, with_kwargs=True)
    module.register_full_backward_hook(lambda *args: None)
    module.register_full_backward_pre_hook(lambda *args: None)
    registries = hook_registries_of(module)
    assert [len(registry) for registry in registries] == [1] * 7
    for registry in registries:
        registry.clear()
    assert torch.equal(module(torch.ones(2)), nn.functional.linear(torch.ones(2), module.weight, module.bias))


def test_versions_tell_changes_in_place() -> None:
    tensors = [nn.Parameter(torch.zeros(2)), torch.zeros(3)]
    seen = [versions(tensors)]
    with torch.no_grad():
        tensors[0].add_(1)
    seen.append(versions(tensors))
    tensors[1][0] = 1
    seen.append(versions(tensors))
    torch._foreach_copy_([tensors[1]], [torch.ones(3)])
    seen.append(versions(iter(tensors)))
    assert sorted(map(tuple, seen)) == list(map(tuple, seen))
    assert len(set(map(tuple, seen))) == 4
    tensors[0].sum().backward()
    assert versions(tensors) == seen[-1]
    tensors[0].data.add_(1)  # leaves no trace, which replicas rely upon as well
    assert versions(tensors) == seen[-1]
    assert versions([]) == []
    with torch.inference_mode():
        made = torch.zeros(2)
    assert versions([*tensors, made]) is None


@pytest.mark.parametrize("foreach", [False, True])
def test_steps_of_optimizers_leave_a_trace(foreach: bool) -> None:
    """Fused ones do not, for which there is `Replicas.distrust`."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0, foreach=foreach)
    parameter.grad = torch.ones(2)
    before = versions([parameter])
    optimizer.step()
    assert versions([parameter]) != before


def test_further_references_to_tensors_are_noticed() -> None:
    """Objects of Python and of C++, and views, are noticed."""
    tensors = [torch.ones(3), torch.ones(2)]
    references = References(tensors)
    assert not references.are_more()
    parameter = nn.Parameter(torch.zeros(2))
    for hold in (lambda: [tensors[0]], lambda: tensors[1][:1], lambda: setattr(parameter, "grad", tensors[1])):
        held = hold()
        assert references.are_more()
        del held
        parameter.grad = None
        assert not references.are_more()


def test_compiled_modules_are_recognised() -> None:
    plain = nn.Sequential(nn.Linear(1, 1))
    assert not is_compiled(plain)
    assert is_compiled(torch.compile(nn.Linear(1, 1), backend="eager"))
    plain[0].compile(backend="eager")
    assert is_compiled(plain[0])
    assert not is_compiled(plain)
    assert is_compiled(from_compiled(torch.compile(LightningModule(), backend="eager")))


def test_hooks_on_parameters_are_recognised() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    assert not has_gradient_hooks(parameter)
    for register in (parameter.register_hook, parameter.register_post_accumulate_grad_hook):
        handle = register(lambda *args: None)
        assert has_gradient_hooks(parameter)
        handle.remove()
        assert not has_gradient_hooks(parameter)


# Metrics


class States(Metric):
    """Has a state of every kind; mean is that of everything seen."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("mean", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="mean")
        self.add_state("smallest", torch.tensor(torch.inf, dtype=torch.float64), dist_reduce_fx="min")
        self.add_state("largest", torch.tensor(-torch.inf, dtype=torch.float64), dist_reduce_fx="max")
        self.add_state("product", torch.tensor(1.0, dtype=torch.float64), dist_reduce_fx=lambda each: each.prod(0))
        self.add_state("joined", torch.zeros(0, dtype=torch.float64), dist_reduce_fx="cat")
        self.add_state("items", [], dist_reduce_fx="cat")
        self.add_state("unreduced", [], dist_reduce_fx=None)

    def update(self, x: Tensor) -> None:
        self.mean = x.mean()
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


def in_parts(metric: Metric, parts: list[tuple[Any, ...]], *, own: bool = True, call: bool = False) -> list[Any]:
    """Lets a metric see a batch whose parts its copies see.

    Args:
        metric: The metric.
        parts: What each part is updated with.
        own: Whether the metric itself sees the first part.
        call: Whether `forward` is called.
    """
    before = take_metric_state(metric)
    copies = [metric if own and not index else copy.deepcopy(metric) for index in range(len(parts))]
    answers = [each(*part) if call else each.update(*part) for each, part in zip(copies, parts, strict=True)]
    merge_metric_states([metric], [before], [copies], [len(part[0]) for part in parts])
    return answers


def test_taking_leaves_a_metric_as_new_and_restoring_brings_all_back() -> None:
    metric = States()
    metric.update(torch.tensor([2.0, 3.0]))
    metric.update(torch.tensor([4.0]))
    computed = metric.compute()
    expected = copy.deepcopy(values(metric))
    state = take_metric_state(metric)
    assert metric.update_count == 0
    assert str(values(metric)) == str(values(States()))
    metric.update(torch.tensor([100.0]))
    metric.reset()
    restore_metric_state(metric, state)
    assert str(values(metric)) == str(expected)
    assert metric.update_count == 2
    assert metric.compute() is computed  # kept, as before


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
        in_parts(metric, [(part,) for part in parts], own=own, call=call)
        expected.update(torch.cat(parts))
        for name, value in values(metric).items():
            if name != "mean":
                torch.testing.assert_close(value, values(expected)[name], rtol=1e-12, atol=1e-12)
        assert metric.update_count == expected.update_count
        if call:
            assert metric._forward_cache == pytest.approx(torch.cat(parts).sum().item())
        else:
            assert metric._forward_cache is None
    means = [torch.cat([torch.tensor(part, dtype=torch.float64) for part in batch]).mean() for batch in batches]
    mean = torch.stack(means).mean().item()
    assert metric.mean.item() == pytest.approx(mean, abs=1e-6 if call else 1e-12)  # forward itself rounds to float32
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
    in_parts(metric, [(torch.ones(1),), (torch.ones(2),)])
    assert metric.last.tolist() == [1, 2]


def test_parts_that_were_not_updated_do_not_count() -> None:
    metric = States()
    metric.update(torch.tensor([1.0]))
    before = take_metric_state(metric)
    copies = [metric, copy.deepcopy(metric), copy.deepcopy(metric)]
    copies[2].update(torch.tensor([5.0, 7.0]))
    merge_metric_states([metric], [before], [copies], [1, 1, 2])
    assert (metric.total, metric.smallest, metric.mean, metric.update_count) == (13, 1, 3.5, 2)
    before = take_metric_state(metric)
    merge_metric_states([metric], [before], [[copy.deepcopy(metric) for _ in range(2)]], [1, 1])
    assert (metric.total, metric.update_count) == (13, 2)


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


# Metrics of several processes


def joined(metrics: list[Any]) -> Any:
    """The first one, holding what all have gathered."""
    join_metrics(metrics[0], [states_to_send(each) for each in metrics])
    return metrics[0]


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(-3, 3), min_size=1, max_size=4), max_size=7), st.integers(1, 4))
def test_metrics_of_processes_end_as_that_of_one(batches: list[list[float]], processes: int) -> None:
    """Batches that were dealt out in turn; some processes may have none."""
    updates = [torch.tensor(batch, dtype=torch.float64) for batch in batches]
    whole, parts = MeansOfUpdates(), [MeansOfUpdates() for _ in range(processes)]
    for index, update in enumerate(updates):
        whole.update(update)
        parts[index % processes].update(update)
    together = joined(parts)
    assert together.update_count == len(batches)
    for metric in (whole, together):
        metric.joined = metric.joined.sort()[0]
    for name in ("total", "mean", "smallest", "largest", "product", "joined"):
        assert_equal(getattr(whole, name), getattr(together, name), 1e-12)
    # In the order of the batches.
    assert_equal([whole.items, whole.unreduced], [together.items, together.unreduced])


class MeansOfUpdates(States):
    """The mean of the means of all updates."""

    def update(self, x: Tensor) -> None:
        before, count = self.mean, self.update_count
        super().update(x)
        self.mean = before + (self.mean - before) / count


def test_states_that_only_the_metric_puts_together() -> None:
    torch.manual_seed(1)
    x, y = torch.randn(2, 12)
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


def test_joined_metrics_compute_alone() -> None:
    metric = joined([MeanSquaredError(), MeanSquaredError()])
    assert not metric.distributed_available_fn()


# Processes


def test_collective_operations_are_counted() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        tensor, other = torch.ones(2), dist.new_group([0])
        for operation in (
            lambda: dist.all_reduce(tensor),
            lambda: dist.all_gather([torch.ones(2)], tensor),
            lambda: dist.broadcast(tensor, 0),
            lambda: dist.all_reduce(tensor, group=other),
            dist.barrier,
        ):
            before = collective_count()
            tensor.add_(1)
            assert collective_count() == before
            operation()
            assert collective_count() > before
    finally:
        dist.destroy_process_group()


# Loaders


def test_functions_that_collate_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert collates_tensors_by_stacking()
    monkeypatch.setitem(collate.default_collate_fn_map, tuple, lambda batch, *, collate_fn_map=None: batch)
    assert default_collate([(1,), (2,)]) == [(1,), (2,)]
    assert not collates_tensors_by_stacking()
