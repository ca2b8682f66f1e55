"""Optimisers of a worker step, scale and clip its parameters as one optimiser of all parameters would."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise.extensions.pipeline.messaging.commands import TensorSpec
from equipoise.extensions.pipeline.processes.workers.tensor_store import TensorStore
from equipoise.extensions.pipeline.processes.workers.worker_optimizers import WorkerOptimizers, unscale
from equipoise.parallel.payload.shared_payload import dumps

CPU = torch.device("cpu")


@pytest.fixture
def module() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    return module


def content_of(optimizer: torch.optim.Optimizer, tensors: list[Tensor]) -> bytes:
    groups = [dict(group, params=list(group["params"])) for group in optimizer.param_groups]
    return dumps((type(optimizer), dict(optimizer.state), groups, optimizer.defaults), tensors)


def worker_of(module: nn.Module, optimizer: torch.optim.Optimizer, keys: list[int]) -> tuple[TensorStore, Any]:
    """Return the tensors and optimisers of a worker that has some of the parameters, with their gradients."""
    parameters = list(module.parameters())
    specs = [TensorSpec(True, tuple(parameter.shape), parameter.dtype) for parameter in parameters]
    store = TensorStore(specs, CPU)
    store.load({key: parameters[key].detach().clone() for key in keys}, dict.fromkeys(keys, True))
    store.set_gradients({key: copy.copy(parameters[key].grad) for key in keys})
    optimizers = WorkerOptimizers(store, CPU)
    optimizers.load(0, content_of(optimizer, parameters))
    return store, optimizers


def test_a_worker_steps_its_parameters_and_no_others(module: nn.Module) -> None:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    optimizer.step()
    keys = [2, 3]
    store, optimizers = worker_of(module, optimizer, keys)
    options = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    options[0]["lr"] = 0.02
    optimizer.param_groups[0]["lr"] = 0.02
    optimizer.step()
    optimizers.step(0, options, {})
    states = optimizers.state_of(0)
    assert states.keys() == set(keys)
    for key, parameter in enumerate(module.parameters()):
        if key in keys:
            assert torch.equal(store[key], parameter)
            assert torch.equal(states[key]["exp_avg"], optimizer.state[parameter]["exp_avg"])
    assert optimizers.state_of(1) == {}


def test_gradients_are_measured_scaled_and_clipped(module: nn.Module) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    store, optimizers = worker_of(module, optimizer, [0, 2])
    gradients = {key: store[key].grad.clone() for key in (0, 2)}  # type: ignore[union-attr]
    optimizers.scale_gradients(0, 2.0)
    optimizers.scale_gradients(0, torch.tensor(2.0))
    for key, norm in optimizers.norms(0).items():
        assert torch.allclose(norm, 4 * gradients[key].norm(), rtol=1e-12)
    optimizers.clip_gradients(0, 1.0, torch.tensor(8.0))
    for key, gradient in gradients.items():
        assert torch.allclose(store[key].grad, gradient / 2, rtol=1e-6)  # type: ignore[arg-type]
    optimizers.clip_gradients(0, 0.01, None)
    assert all(store[key].grad.abs().max() <= 0.01 for key in gradients)  # type: ignore[union-attr]


@pytest.mark.parametrize("is_finite", [True, False])
def test_unscaling_reports_an_overflow(module: nn.Module, is_finite: bool) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    store, optimizers = worker_of(module, optimizer, [0, 1])
    gradient = store[1].grad
    assert gradient is not None
    if not is_finite:
        gradient[0] = float("inf")
    before = gradient.clone()
    assert optimizers.unscale_gradients(0, 4.0) is is_finite
    assert torch.equal(gradient, before / 4)


def test_unscaling_nothing_is_finite() -> None:
    assert unscale([], 2.0, CPU)
