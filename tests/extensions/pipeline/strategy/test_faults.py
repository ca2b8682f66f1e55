"""Errors in a pipeline end it cleanly; steps that run out of memory are done again; and bad input is refused."""

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.utils.data import DataLoader

from equipoise import ConfigurationError, OOMRecovery, StepError
from tests.support.batches import CLASSES, FEATURES, Batches
from tests.support.networks.layers import WIDTH, Task, layers, network
from tests.support.networks.transparency import Base, Mlp
from tests.support.pairs import pairwise
from tests.support.pipelines import (
    Copying,
    Tokens,
    assert_as_on_one_device,
    assert_same,
    fit,
    pipelined,
    quiet,
    stay_whole,
)

pytestmark = [
    pytest.mark.filterwarnings(
        r"ignore:Batch \d+ of \d+ samples?", r"ignore:cpu \(number \d\) ran out", "ignore:cpu ran out"
    ),
    pytest.mark.usefixtures("quick_collections"),
]

SIZES = [13, 13, 5]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("equipoise")] == []


# Errors


class Fault(nn.Module):
    """Raises in the forward or the backward at its n-th call.

    Args:
        at: The call, from 0; those of profiling do not count.
        phase: Where.
        error: What it raises.
        times: How many calls in a row.
    """

    def __init__(self, at: int = 2, phase: str = "forward", error: Any = ValueError, times: int = 1) -> None:
        super().__init__()
        self.at, self.phase, self.error, self.times, self.calls = at, phase, error, times, 0
        self.armed = False
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        stay_whole(x)
        out = torch.tanh(self.layer(x))
        if not self.armed or not self.training or not torch.is_grad_enabled():
            return out
        self.calls += 1
        if self.at < self.calls <= self.at + self.times:
            if self.phase == "forward":
                raise self.error("injected")
            out.register_hook(self.fail)
        return out

    def fail(self, gradient: Any) -> None:
        raise self.error("injected")


class Failing(Task):
    """One of three layers fails after the first step, or from the first window on."""

    def __init__(self, where: int, **options: Any) -> None:
        blocks: list[nn.Module] = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
        blocks[where] = Fault(**options)
        super().__init__(nn.Sequential(nn.Flatten(), *blocks, nn.Linear(WIDTH, CLASSES)))
        self.where = where

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net[self.where + 1].armed = self.trainer.global_step > 0 or self.trainer.accumulate_grad_batches > 1
        return nn.functional.cross_entropy(self.net(batch["features"]), batch["label"])


CUT = {"cut_before": ["net.2", "net.3"], "micro_batches": 4}
ERRORS = [ValueError, KeyboardInterrupt, SystemExit]
# On three devices, and four stages on two.
LOOP = {"cut_before": ["net.2", "net.3", "net.4"], "schedule": "interleaved_1f1b"}
PLANS: list[tuple[int, dict[str, Any]]] = [(3, {}), (2, LOOP)]


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize(
    ("stage", "phase", "error", "threads", "plan"),
    pairwise([0, 1, 2], ["forward", "backward"], ERRORS, [None, True], PLANS),
)
def test_errors_in_a_stage_end_the_run_cleanly(stage, phase, error, threads, plan):
    """They name the stage; no thread is left, no forward is caught any more, and the same trainer can continue."""
    module = Failing(stage, phase=phase, error=error).double()
    devices, schedule = plan
    options = pipelined(devices, threads=threads, **{**CUT, **schedule})
    trainer = quiet(**options)
    with pytest.raises(error, match="injected") as raised:
        trainer.fit(module, DataLoader(Batches(SIZES), batch_size=None))
    device = options["strategy"].devices[stage % devices]
    assert f"This was stage {stage} of the pipeline, on {device}." in raised.value.__notes__
    assert "forward" not in vars(module.net)
    assert "forward" not in vars(module)
    module.net[stage + 1].at = 10**6
    trainer.fit(module, DataLoader(Batches(SIZES), batch_size=None))


def forward_mode(network: Any, features: Any) -> Any:
    with dual_level():
        return unpack_dual(network(make_dual(features, torch.ones_like(features)))).tangent


TRANSFORMS: dict[str, Callable[[Any, Any], Any]] = {
    "rows": lambda network, features: vmap(network)(features),
    "Jacobians of rows": lambda network, features: vmap(jacrev(network))(features),
    "gradient": lambda network, features: grad(lambda value: network(value).sum())(features),
    "products with a Jacobian": lambda network, features: jvp(network, (features,), (features,))[1],
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


class FailingStep(Mlp):
    def __init__(self, place: str) -> None:
        super().__init__()
        self.place, self.cleaned = place, 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        fails = len(batch["label"]) == 3
        try:
            if fails and self.place == "before":
                raise ValueError("injected")
            logits = self(batch["features"])
            if fails:
                raise ValueError("injected")
        except Exception:
            # Steps that are abandoned pass by this.
            assert fails
            raise
        finally:
            self.cleaned += 1
        return nn.functional.cross_entropy(logits, batch["label"])


@pytest.mark.parametrize("threads", [None, True])
@pytest.mark.parametrize("place", ["before", "after"])
def test_errors_in_a_step_end_it_and_all_others(place, threads):
    """Of five micro-batches the fourth fails; every step that has begun comes to its end."""
    module = FailingStep(place).double()
    trainer = quiet(**pipelined(2, micro_batches=4, threads=threads))
    with pytest.raises(ValueError, match="injected"):
        trainer.fit(module, DataLoader(Batches([13]), batch_size=None))
    assert module.cleaned == (2 if place == "before" else 4)
    assert "forward" not in vars(module)


def test_a_failed_attempt_keeps_no_tensor_alive():
    """Without the help of the garbage collector."""
    alive: list[Any] = []
    # Threads of autograd, one for each device, may release the last graph a moment after the error.
    ended = threading.Semaphore(0)

    class Kept(Failing):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            tensor = batch["features"] * 1
            alive.append(weakref.ref(tensor, lambda _: ended.release()))
            return super().training_step({**batch, "features": tensor}, batch_idx)

    gc.collect()
    gc.disable()
    try:
        for threads in (None, True):
            module = Kept(1, phase="backward").double()
            trainer = quiet(**pipelined(3, threads=threads, **CUT))
            with pytest.raises(ValueError, match="injected"):
                trainer.fit(module, DataLoader(Batches(SIZES), batch_size=None))
            assert alive
            for _ in alive:
                assert ended.acquire(timeout=60)
            assert [one for one in alive if one() is not None] == []
            alive.clear()
    finally:
        gc.enable()


# Out of memory


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    ("stage", "phase", "threads", "plan"), pairwise([0, 1, 2], ["forward", "backward"], [None, True], PLANS)
)
def test_a_stage_that_runs_out_of_memory_takes_smaller_micro_batches(stage, phase, threads, plan):
    """The step is done again with more of them, exactly, in the midst of an accumulation window."""

    def make(**options: Any) -> Any:
        return Failing(stage, **options)

    options: dict[str, Any] = {"accumulate_grad_batches": 2}
    expected = fit(lambda: make(at=10**6), SIZES, **options)
    recovery = OOMRecovery()

    def failing() -> Any:
        return make(phase=phase, error=torch.OutOfMemoryError, at=5, times=2)

    devices, schedule = plan
    options |= pipelined(devices, threads=threads, **{**CUT, **schedule})
    run = fit(failing, SIZES, **options, callbacks=[recovery])
    assert_same(expected, run)
    assert run.module.net[stage + 1].calls > 2 * (4 + 4 + 4)
    assert recovery.events[-1].device == str(options["strategy"].devices[stage % devices])


# Refusals


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"micro_batches": 0}, "micro_batches must be an integer of at least 1, not 0"),
        ({"micro_batches": "x"}, "micro_batches must be an integer of at least 1, not 'x'"),
        ({"micro_batches": 2.5}, "micro_batches must be an integer of at least 1, not 2.5"),
        ({"micro_batches": True}, "micro_batches must be an integer of at least 1, not True"),
        ({"cut_before": "net.2"}, "cut_before takes a list of names"),
        ({"cut_before": [2]}, "cut_before takes a list of names"),
        ({"speeds": [1, 0]}, "speeds are numbers above 0"),
        ({"speeds": [1, "x"]}, "speeds are numbers above 0"),
        ({"speeds": [1, float("nan")]}, "speeds are numbers above 0"),
        ({"speeds": 2}, "speeds are numbers above 0"),
        ({"threads": 2}, "threads is True, False or None, not 2"),
        ({"cut_before": ["a", "b"]}, r"cut_before must have 1 entries for 2 devices.*has 2: \['a', 'b'\]"),
        ({"link_speeds": [1000, 0]}, "link_speeds are MiB per second above 0"),
        ({"link_speeds": [1000]}, "link_speeds must have 2 entries for 2 devices"),
        ({"speeds": [1, 2, 3]}, "speeds must have 2 entries for 2 devices"),
        ({**LOOP, "cut_before": ["net.2"]}, "cut_before must have 3 entries for 2 devices, 2 on each, but has 1"),
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
    "one block": (
        lambda: Task(
            nn.Sequential(nn.Linear(FEATURES, CLASSES)), lambda module, batch: module.net(batch["features"]).mean()
        ),
        THREE,
        "has 1 block to cut between, which is not enough for 3 stages",
    ),
    "a name that is not called": (
        Mlp,
        {"cut_before": ["net.11"]},
        r"cut_before names 'net.11', which the network does not call. Did you mean 'net.1'",
    ),
    "a name of another network": (Mlp, {"cut_before": ["nett.1"]}, r"Did you mean 'net.1'"),
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
    "changes data of a weight before": (lambda: changing(lambda weight: weight.data.mul_(0.9)), CHANGED),
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
