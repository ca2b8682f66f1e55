"""Arguments, networks, cuts and steps that no pipeline can compute are refused, each with the reason and a way out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader

from equipoise import ConfigurationError, StepError
from tests.support.batches import CLASSES, FEATURES, Batches
from tests.support.networks.layers import WIDTH, Task, layers, network
from tests.support.networks.transparency import Base, Mlp
from tests.support.pipelines import Copying, Tokens, assert_as_on_one_device, fit, pipelined, quiet, stay_whole

pytestmark = pytest.mark.usefixtures("no_thread_is_left")

LOOP = {"schedule": "interleaved_1f1b"}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"micro_batches": 0}, "micro_batches must be an integer of at least 1, not 0"),
        ({"micro_batches": True}, "micro_batches must be an integer of at least 1, not True"),
        ({"cut_before": "net.2"}, "cut_before takes a list of names"),
        ({"speeds": [1, 0]}, "speeds are numbers above 0"),
        ({"speeds": [1, float("nan")]}, "speeds are numbers above 0"),
        ({"speeds": 2}, "speeds are numbers above 0"),
        ({"engine": "process"}, "engine must be 'threads' or 'processes', not 'process'"),
        ({"engine": "processes", "threads": True}, "threads are for engine='threads'"),
        ({"engine": "processes", "timeout": 0}, "timeout is a positive number of seconds"),
        ({"threads": 2}, "threads is True, False or None, not 2"),
        ({"cut_before": ["a", "b"]}, r"cut_before must have 1 entries for 2 devices.*has 2: \['a', 'b'\]"),
        ({"link_speeds": [1000, 0]}, "link_speeds are MiB per second above 0"),
        ({"link_speeds": [1000]}, "link_speeds must have 2 entries for 2 devices"),
        ({"speeds": [1, 2, 3]}, "speeds must have 2 entries for 2 devices"),
        (
            {**LOOP, "cut_before": ["net.2"]},
            "cut_before must have 3 entries for 2 devices, 2 on each, but has 1",
        ),
        ({**LOOP, "speeds": [1] * 6}, "speeds must have 2 entries for 2 devices, 2 on each, but has 6"),
    ],
)
def test_wrong_arguments(options, told):
    with pytest.raises(ConfigurationError, match=told):
        quiet(**pipelined(2, **options))


class Untraceable(Base):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, 9), nn.Linear(9, CLASSES)

    def forward(self, features: Any) -> Any:
        hidden = self.one(features.flatten(1))
        if hidden.sum() > 0:
            hidden = hidden * 2
        return self.other(hidden)


def in_place() -> Mlp:
    module = Mlp()
    module.net[2] = nn.ReLU(inplace=True)
    return module


class OwnCuts(Mlp):
    def pipeline_cuts(self) -> list[str]:
        return ["net.3"]


class Box:
    def __init__(self, value: Any) -> None:
        self.value = value


class First(nn.Linear):
    """Hands on an object."""

    def forward(self, x: Any) -> Any:
        stay_whole(x)
        return Box(super().forward(x))


class Second(nn.Linear):
    def forward(self, box: Any) -> Any:
        stay_whole(box.value)
        return super().forward(box.value)


class ByHand(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch["features"])


class OwnBackward(Mlp):
    predict_step = ByHand.predict_step

    def backward(self, loss: Any) -> None:
        loss.backward()


def compiled() -> Mlp:
    module = Mlp()
    module.net.compile()
    return module


def shared_statistics() -> Task:
    """A layer with running statistics is called in two stages."""
    inner = {"norm": nn.BatchNorm1d(WIDTH), "one": nn.Linear(WIDTH, WIDTH), "other": nn.Linear(WIDTH, CLASSES)}
    return Task(network(lambda self, x: self.other(self.norm(self.one(self.norm(x.flatten(1))))), **inner))


def hooked_tied_weight() -> Tokens:
    module = Tokens()
    module.net.embedding.weight.register_hook(lambda gradient: gradient)
    return module


def packing() -> Task:
    def step(module: Any, batch: Any) -> Any:
        lengths = torch.tensor([2] * len(batch["features"]))
        return module.net(nn.utils.rnn.pack_padded_sequence(batch["features"], lengths, batch_first=True))[1][0].sum()

    return Task(nn.LSTM(FEATURES, 4), step)


def asking(*blocks: nn.Module) -> Task:
    """So few blocks that three devices with two stages each cannot share them."""
    return Task(nn.Sequential(*blocks))


class Asks(nn.Module):
    """Asks for a value, and so stays whole."""

    def __init__(self, width: int, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.layer, self.inner = nn.Linear(WIDTH, width), inner

    def forward(self, features: Any) -> Any:
        hidden = self.layer(features.flatten(1))
        hidden = hidden if self.inner is None else self.inner(hidden)
        return hidden * 2 if hidden.sum() > 1e9 else hidden


THREE = {"stages": 3}
NETWORKS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "asks for a value": (
        Untraceable,
        {},
        r"Untraceable.forward, line \d+: `if hidden.sum\(\) > 0:`.*nn.Sequential.*single_device",
    ),
    "its only block asks for a value": (
        lambda: Task(Untraceable()),
        {},
        r"not enough for 2 stages.*'net' \(Untraceable\), which .* is one block.*Untraceable.forward, line \d+",
    ),
    "a name that is not called": (
        Mlp,
        {"cut_before": ["net.11"]},
        r"cut_before names 'net.11', which the network does not call. Did you mean 'net.1'",
    ),
    "a name like no other": (
        Mlp,
        {"cut_before": ["zzz"]},
        r"which the network does not call. There are net, net.0, net.1",
    ),
    "a cut at the beginning": (Mlp, {"cut_before": ["net.0"]}, "that is where it begins"),
    "names out of order": (
        Mlp,
        {**THREE, "cut_before": ["net.3", "net.1"]},
        "it comes before the cut named earlier",
    ),
    "a cut before a change in place": (
        in_place,
        {"cut_before": ["net.2"]},
        "what it begins with is changed in place",
    ),
    "too few cuts of its own": (OwnCuts, THREE, "3 stages need 2 names to cut before, but there are 1"),
    "stages that exchange an object": (
        lambda: layers(First(WIDTH, WIDTH), Second(WIDTH, WIDTH)),
        {"cut_before": ["net.2"]},
        "'net' stays whole, since it cannot be followed: .*First returns a Box, which may change",
    ),
    "a call with an object": (
        lambda: layers(nn.Linear(WIDTH, WIDTH), step=lambda module, batch: module.net(Box(batch["features"]))),
        {},
        "The network is called with a Box, whose tensors a pipeline cannot see",
    ),
    "a call with a packed sequence": (packing, {}, r"called with a PackedSequence.*pack within a submodule"),
    "optimises by hand": (ByHand, {}, "optimises by hand"),
    "a backward of its own": (OwnBackward, {}, "overrides `backward`"),
    "compiled": (compiled, {}, "is compiled.*Leave torch.compile out"),
    "copies of a layer with statistics": (
        shared_statistics,
        {"strategy": Copying, "cut_before": ["net.one"]},
        r"'net.norm' is used by two stages.*running statistics",
    ),
    "a hook on a tied weight": (
        hooked_tied_weight,
        {"strategy": Copying},
        "has a hook, which would see the gradient of one of them",
    ),
    "too few blocks": (
        lambda: asking(Asks(WIDTH), Asks(WIDTH, Asks(60)), nn.Linear(60, CLASSES)),
        {**THREE, "schedule": "looped_bfs"},
        r"not enough for 6 stages.*Give fewer devices or stages_per_device.*'net.1' \(Asks\), which has .*"
        r"Asks.forward, line.*`return hidden \* 2 if hidden.sum\(\) > 1e9 else hidden`",
    ),
}


def refused(make: Any, told: str, error: type[Exception], *, stages: int = 2, sizes: Any = (8,), **options: Any) -> str:
    """Check that a fit is refused, and leaves the module as it was; return the message."""
    module = make().double()
    given = {name: options.pop(name) for name in ("accumulate_grad_batches",) if name in options}
    with pytest.raises(error, match=told) as caught:
        quiet(**pipelined(stages, **options), **given).fit(module, DataLoader(Batches(sizes), batch_size=None))
    assert "forward" not in vars(module)
    return str(caught.value)


@pytest.mark.few_cases(10)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it compiles
@pytest.mark.parametrize("case", NETWORKS)
def test_networks_and_cuts_that_are_refused(case):
    make, options, told = NETWORKS[case]
    refused(make, told, ConfigurationError, **options)


def test_one_block_is_not_told_to_take_fewer_devices() -> None:
    words = "not enough for 6 stages.*choose another strategy, such as 'dp' or 'ddp'"
    told = refused(lambda: asking(Asks(CLASSES)), words, ConfigurationError, stages=3, schedule="looped_bfs")
    assert "fewer devices" not in told


def test_memory_that_is_not_enough(monkeypatch):
    monkeypatch.setattr("equipoise.extensions.pipeline.planning.cut._RESERVE", 1e-9)
    told = "No cut of the network fits into memory; the best would need: stage 0 on (cpu|cuda:0) "
    refused(Mlp, told, ConfigurationError)


# Steps


def calls_twice(module: Any, batch: Any) -> Any:
    return (module(batch["features"]) + module.net(batch["features"])).mean()


def never_calls(module: Any, batch: Any) -> Any:
    return (module.other.weight * batch["features"]).mean()


def beside_network(step: Callable[[Any, Any], Any]) -> Task:
    module = layers(nn.Linear(WIDTH, WIDTH), nn.Tanh(), step=step)
    module.other = nn.Linear(FEATURES, 1)
    return module


def changing(change: Callable[[Any], Any], *, after: bool = False) -> Task:
    """Its step changes a weight or a gradient before or after its call of the network."""

    def step(module: Any, batch: Any) -> Any:
        loss = module(batch["features"]).mean() if after else None
        with torch.no_grad():
            change(next(module.net.parameters()))
        return module(batch["features"]).mean() if loss is None else loss

    return beside_network(step)


def halve_gradient(weight: Any) -> None:
    if weight.grad is not None:
        weight.grad.mul_(0.5)


def slopes(*, of_output: bool) -> Task:
    """Its step takes the gradients of the output, or of the loss, with respect to something."""

    def step(module: Any, batch: Any) -> Any:
        features = batch["features"].clone().requires_grad_()
        output = module(features)
        given = output if of_output else features
        slopes = torch.autograd.grad(output.pow(3).sum(), given, create_graph=True, allow_unused=True)[0]
        return output.square().mean() + (0 if slopes is None else slopes.square().mean())

    return beside_network(step)


def slopes_of_output() -> Task:
    return slopes(of_output=True)


CHANGED = r"changes 'net\..*weight', .*once for each micro-batch.*in a hook"
STEPS: dict[str, tuple[Any, str]] = {
    "calls the network twice": (lambda: beside_network(calls_twice), "calls the network twice.*torch.cat"),
    "never calls it": (lambda: beside_network(never_calls), "did not call the network.*choose another strategy"),
    "changes a weight before": (lambda: changing(lambda weight: weight.clamp_(-0.1, 0.1)), CHANGED),
    "changes data of a weight after": (lambda: changing(lambda weight: weight.data.mul_(0.9), after=True), CHANGED),
    "changes a gradient": (lambda: changing(halve_gradient), r"changes the gradient of 'net\..*weight'"),
    "takes gradients": (
        lambda: slopes(of_output=False),
        "takes gradients through the network.*with dp or ddp",
    ),
}


@pytest.mark.parametrize("case", STEPS)
def test_steps_that_are_refused(case):
    make, told = STEPS[case]
    refused(make, told, StepError, sizes=(4, 4), accumulate_grad_batches=2)


def test_gradients_of_the_output_are_taken_in_a_step():
    """The graph after the network is whole."""
    assert_as_on_one_device(slopes_of_output, pipelined(2))


@pytest.mark.parametrize("make", [ByHand, OwnBackward])
def test_modules_with_a_backward_of_their_own_are_evaluated(make):
    quiet(**pipelined(2)).predict(make().double(), DataLoader(Batches([4]), batch_size=None))


def test_pipeline_cuts_of_the_module_are_taken():
    run = fit(OwnCuts, (4,), **pipelined(2))
    assert run.trainer.connected_strategy.portable.strategy_state()["cut_before"] == ["net.3"]


def test_shared_layers_with_statistics_on_one_device():
    fit(shared_statistics, (8,), sync_batchnorm=True, **pipelined(2, cut_before=["net.one"], micro_batches=2))


# Transforms of torch.func


def forward_mode(network: Any, features: Any) -> Any:
    with dual_level():
        return unpack_dual(network(make_dual(features, torch.ones_like(features)))).tangent


TRANSFORMS: dict[str, Callable[[Any, Any], Any]] = {
    "rows": lambda network, features: vmap(network)(features),
    "gradient": lambda network, features: grad(lambda value: network(value).sum())(features),
    "gradients of weights": lambda network, features: grad(
        lambda weights: functional_call(network, weights, (features,)).sum()
    )(dict(network.named_parameters()))["1.weight"],
    "forward mode": forward_mode,
}


def transforming(step: Callable[[Any, Any], Any]) -> Task:
    parts = [nn.Flatten(0), nn.Unflatten(0, (-1, FEATURES)), nn.Linear(FEATURES, 4), nn.Linear(4, 1)]
    return Task(nn.Sequential(*parts), step)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_of_the_network_are_refused(transform):
    module = transforming(lambda module, batch: transform(module.net, batch["features"]).square().mean())
    with pytest.raises(StepError, match=r"network within a transform of torch\.func .* on one device, or with ddp\."):
        quiet(**pipelined(2)).fit(module.double(), DataLoader(Batches([4]), batch_size=None))


def transforms_the_sine() -> Task:
    sine = TRANSFORMS["gradient"]
    return transforming(lambda module, batch: module.net(sine(torch.sin, batch["features"])).square().mean())


def test_transforms_of_other_functions():
    assert_as_on_one_device(transforms_the_sine, pipelined(2))
