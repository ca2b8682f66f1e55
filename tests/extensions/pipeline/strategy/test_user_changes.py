"""Reads and changes of the user's code between steps: as on one device, or refused."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.profilers import SimpleProfiler
from torch import Tensor, nn

from equipoise import StepError
from tests.support.batches import FEATURES as WIDTH
from tests.support.equality import assert_equal
from tests.support.networks.layers import Task
from tests.support.pipelines import assert_same, fit, pipelined, processes

pytestmark = pytest.mark.usefixtures("quick_collections")


class Layer(nn.Module):
    """Keeps a buffer that the user changes, and one that it changes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("temperature", torch.tensor(1.0))
        self.register_buffer("total", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.total.add_(x.detach().sum(0))
        return torch.tanh(x / self.temperature)


class Model(Task):
    """The weight of the first stage is tied to that of the last."""

    make_optimizer: Callable[..., Any] = staticmethod(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))

    def __init__(self) -> None:
        linears = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        linears[3].weight = linears[0].weight
        parts = [linears[0], Layer(), linears[1], nn.LeakyReLU(0.3), linears[2], nn.Tanh(), linears[3]]
        super().__init__(nn.Sequential(*parts))
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.net(batch["features"].mean(1)).sum(1) - batch["label"]).square().mean()

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


def hooking(hook: str, act: Callable[[Any], Any]) -> Callable[[], Model]:
    """Make modules that do something in a hook."""

    def make() -> Model:
        module = Model()
        setattr(module, hook, lambda *args: act(module))
        return module

    return make


def compare(make: Callable[[], Model], schedule: str, **options: Any) -> None:
    options["sizes"] = (8, 8, 8, 8)
    expected, actual = fit(make, **options), fit(make, **processes(2, schedule=schedule), **options)
    assert_same(expected, actual)
    assert_equal(expected.module.seen, actual.module.seen, 1e-12)


# Optimisers


class ByNorm(torch.optim.SGD):
    """Divides by the norm of all parameters, and clips the norm of all gradients."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        parameters = self.param_groups[0]["params"]
        nn.utils.clip_grad_norm_(parameters, 0.5)
        self.param_groups[0]["lr"] = 0.3 / torch.stack([parameter.detach().norm() for parameter in parameters]).norm()
        super().step()
        return loss


class ByLoss(torch.optim.SGD):
    """Computes each batch at two places, as sharpness-aware steps do, and decides by both losses."""

    def step(self, closure: Any = None) -> Any:
        parameters = self.param_groups[0]["params"]
        loss = closure()
        with torch.no_grad():
            moves = [0.01 * parameter.grad for parameter in parameters]
            torch._foreach_add_(parameters, moves)
        other = closure()
        with torch.no_grad():
            torch._foreach_sub_(parameters, moves)
        self.param_groups[0]["lr"] = 0.01 * float(loss / other)
        super().step()
        return loss


def clamping(parameters: Any) -> Any:
    optimizer = torch.optim.Adam(parameters, lr=0.05)

    @torch.no_grad()
    def clamp(*args: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.clamp_(-0.2, 0.2)

    optimizer.register_step_post_hook(clamp)
    return optimizer


OPTIMIZERS = {
    "all norms": lambda p: ByNorm(p, lr=0.01),
    "losses": lambda p: ByLoss(p, lr=0.01),
    "all values": clamping,
}


@pytest.mark.thorough
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers_that_look_at_all_parameters_or_at_the_loss(make_optimizer: Any) -> None:
    def make() -> Model:
        module = Model()
        module.make_optimizer = make_optimizer
        return module

    compare(make, "interleaved_1f1b")


# Tensors of other processes


def buffers(module: Any) -> None:
    module.net[1].temperature.mul_(0.9)
    module.net[1].total.data.mul_(0.5)
    module.seen.append(copy.deepcopy(module.net[1]).total.sum().item())


def tied_weight(module: Any) -> None:
    module.net[6].weight.data.clamp_(-0.2, 0.2)


def tied_gradient(module: Any) -> None:
    module.seen.append(module.net[6].weight.grad.norm().item())
    module.net[6].weight.grad.data.clamp_(-0.01, 0.01)


def states(module: Any) -> None:
    state = module.optimizers().state
    module.seen.append(sum(float(value["momentum_buffer"].norm()) for value in state.values()))
    for value in state.values():
        value["momentum_buffer"].mul_(0.5)


def loaded_states(module: Any) -> None:
    """Also after the last step, with which the run ends."""
    fresh = module.make_optimizer(module.parameters())
    module.optimizers(use_pl_optimizer=False).load_state_dict(fresh.state_dict())


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("hook", "act", "window", "schedule"),
    [
        ("on_train_batch_end", buffers, 1, "1f1b"),
        ("on_before_optimizer_step", tied_weight, 1, "interleaved_1f1b"),
        ("on_after_backward", tied_gradient, 2, "1f1b"),
        ("on_train_batch_end", states, 1, "1f1b"),
        ("on_train_epoch_end", loaded_states, 1, "interleaved_1f1b"),
    ],
)
def test_buffers_states_and_tied_parameters_are_read_and_changed_between_steps_as_on_one_device(
    hook: str, act: Any, window: int, schedule: str
) -> None:
    compare(hooking(hook, act), schedule, accumulate_grad_batches=window)


class Reads(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.seen.append(self.net[1].total.sum().item())
        return loss


@pytest.mark.thorough
def test_a_buffer_is_not_read_within_a_step() -> None:
    with pytest.raises(StepError, match=r"buffer of another stage .* during a step.*on_train_batch_end"):
        fit(Reads, **processes(2))


# Layers


def other_layer(module: Any) -> None:
    module.net[2] = nn.Linear(WIDTH, WIDTH)


def other_slope(module: Any) -> None:
    module.net[3].negative_slope = 0.1


def other_weight(module: Any) -> None:
    module.net[2].weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))


def hooked(module: Any) -> None:
    module.net[2].register_forward_hook(lambda *args: None)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("act", "engine", "message"),
    [
        (other_layer, "threads", "A layer of net was replaced"),
        (other_layer, "processes", "A layer of net was replaced"),
        (other_slope, "processes", "A setting of the layer 'net.3' was set"),
        (other_weight, "processes", "A tensor of the layer 'net.2' was set"),
        (hooked, "processes", "A hook of the layer 'net.2' was set"),
    ],
)
def test_layers_that_are_changed_in_a_run_are_refused(act: Any, engine: Any, message: str) -> None:
    with pytest.raises(StepError, match=message):
        fit(hooking("on_train_epoch_end", act), **pipelined(2, engine=engine, cut_before=["net.4"]))


# Profiles


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_a_profile_measures_a_batch_as_a_whole(engine: Any, tmp_path: Path) -> None:
    """The steps of micro-batches run in threads of their own, at the same time, and a profiler works in one only."""
    profiler = SimpleProfiler(dirpath=tmp_path, filename="report")
    fit(Model, profiler=profiler, **pipelined(2, engine=engine))
    assert "run_training_batch" in (tmp_path / "fit-report.txt").read_text()
