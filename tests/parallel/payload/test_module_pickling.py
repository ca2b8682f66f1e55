"""Parametrised and compiled modules arrive as they were sent, and continue as such."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.compile import from_compiled
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from equipoise.parallel.payload.object_bytes import dumps, loads
from equipoise.parallel.workers.launch import launch
from tests.support.equality import assert_equal


class Symmetric(nn.Module):
    """Has a state of its own, and a way back."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, weight: Tensor) -> Tensor:
        return self.scale * (weight.triu() + weight.triu(1).mT)

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight.triu() / self.scale


class Marked(nn.Linear):
    """Leaves something out of its state."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.left_out, self.kept = object(), "kept"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "left_out"}


def weight_norm() -> nn.Module:
    return parametrizations.weight_norm(nn.Conv1d(3, 3, 1))


def spectral_norm() -> nn.Module:
    return parametrizations.spectral_norm(nn.Linear(3, 3)).eval()


def symmetric() -> nn.Module:
    layer = Marked()
    parametrize.register_parametrization(layer, "weight", Symmetric())
    parametrize.register_parametrization(layer, "bias", nn.Tanh())
    return parametrize.register_parametrization(layer, "weight", nn.Softplus())


@pytest.mark.parametrize("make", [weight_norm, symmetric])
def test_a_parametrised_layer_survives_a_pickle(make: Any) -> None:
    torch.manual_seed(1)
    module = nn.ModuleList([make()])
    module.append(module[0])
    other = loads(dumps(module))
    assert other[1] is other[0]
    assert [name for name, _ in other.named_parameters()] == [name for name, _ in module.named_parameters()]
    assert torch.equal(other[0].weight, module[0].weight)
    assert parametrize.is_parametrized(other[0], "weight")
    assert parametrize.type_before_parametrizations(other[0]) is parametrize.type_before_parametrizations(module[0])
    assert (getattr(other[0], "kept", None), hasattr(other[0], "left_out")) == (getattr(module[0], "kept", None), False)
    for each in (module, other):
        each[0](torch.ones(3, 3)).sum().backward()
    assert_equal(*([parameter.grad for parameter in each.parameters()] for each in (module, other)))
    again = copy.deepcopy(other[0])
    parametrize.remove_parametrizations(again, "weight")
    assert torch.equal(again.weight, module[0].weight)


CALLS: list[int] = []


def counting(graph: Any, inputs: Any) -> Any:
    """A backend that tells that something was compiled."""
    CALLS.append(len(inputs))
    return graph.forward


def compiled_there(rank: int, module: nn.Module) -> tuple[Tensor, int]:
    before = len(CALLS)
    with torch.inference_mode():
        return module(torch.ones(2, 3)), len(CALLS) - before


class Net(nn.Module):
    """Torch compiles forwards of the user's own; those of its own layers it leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()


def with_parametrisation() -> nn.Module:
    module = Net()
    parametrize.register_parametrization(module.layer, "weight", nn.Tanh())
    module.register_parameter("own", nn.Parameter(torch.ones(3)))
    parametrize.register_parametrization(module, "own", nn.Tanh())
    module.compile(backend=counting)
    return module


def wrapped() -> nn.Module:
    return torch.compile(Net(), backend=counting)


@pytest.mark.slow
@pytest.mark.parametrize("make", [with_parametrisation, wrapped])
def test_a_compiled_module_is_compiled_where_it_arrives(make: Any) -> None:
    torch._dynamo.reset()
    module = make()
    expected = module(torch.ones(2, 3)).detach()
    assert CALLS
    found, compiled = launch(partial(compiled_there, module=module), 1)
    assert torch.equal(found, expected)
    assert compiled > 0


def test_a_module_that_is_compiled_in_place_survives_a_pickle() -> None:
    torch._dynamo.reset()
    module = Net()
    module.compile(backend=counting, dynamic=False)
    other = loads(dumps(module))
    before = len(CALLS)
    value = other(torch.ones(2, 3))
    assert len(CALLS) > before
    assert torch.equal(value, module(torch.ones(2, 3)))


class Task(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)


def test_a_compiled_lightning_module_survives_a_pickle() -> None:
    """Lightning puts compiled methods in the place of the module's own."""
    torch._dynamo.reset()
    task = from_compiled(torch.compile(Task(), backend=counting))
    other = loads(dumps(task))
    before = len(CALLS)
    loss = other.training_step(torch.ones(4, 3), 0)["loss"]
    assert len(CALLS) > before
    assert torch.equal(loss, task.training_step(torch.ones(4, 3), 0)["loss"])
    assert loads(dumps(other)).layer.weight.equal(task.layer.weight)
