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

from equipoise import ConfigurationError, OOMRecovery, PipelineStrategy, StepError
from tests.support.batches import CLASSES, FEATURES, Batches
from tests.support.networks.transparency import Base, Mlp
from tests.support.one_device import Gradients, assert_same_run
from tests.support.pairs import pairwise
from tests.support.pipelines import Copying, Tokens, fit, pipelined, quiet, stay_whole

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
        self.layer = nn.Linear(30, 30)

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


class Failing(Base):
    def __init__(self, where: int = 0, **options: Any) -> None:
        super().__init__()
        blocks: list[nn.Module] = [nn.Linear(30, 30) for _ in range(3)]
        if where >= 0:
            blocks[where] = Fault(**options)
        self.net = nn.Sequential(nn.Flatten(), *blocks, nn.Linear(30, CLASSES))

    def forward(self, features: Any) -> Any:
        for part in self.net:
            if isinstance(part, Fault):
                part.armed = False
        return self.net(features)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for part in self.net:
            if isinstance(part, Fault):
                part.armed = self.trainer.global_step > 0 or self.trainer.accumulate_grad_batches > 1
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


class Transforming(Base):
    def __init__(self, transform: Callable[[Any, Any], Any], through: bool = True) -> None:
        super().__init__()
        self.transform, self.through = transform, through
        self.net = nn.Sequential(
            nn.Flatten(0), nn.Unflatten(0, (-1, FEATURES)), nn.Linear(FEATURES, 4), nn.Linear(4, 1)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.through:
            return self.transform(self.net, batch["features"]).square().mean()
        return self.net(self.transform(torch.sin, batch["features"])).square().mean()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_of_the_network_are_refused(transform):
    with pytest.raises(StepError, match=r"network within a transform of torch\.func .* on one device, or with ddp\."):
        quiet(**pipelined(2)).fit(Transforming(transform).double(), DataLoader(Batches(SIZES), batch_size=None))


def test_transforms_of_other_functions():
    def make() -> Any:
        return Transforming(TRANSFORMS["gradient"], through=False)

    assert_same_run(fit(make, SIZES), fit(make, SIZES, **pipelined(2)))


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
    gradients = Gradients()
    recovery = OOMRecovery()

    def failing() -> Any:
        return make(phase=phase, error=torch.OutOfMemoryError, at=5, times=2)

    devices, schedule = plan
    options |= pipelined(devices, threads=threads, **{**CUT, **schedule})
    module, _, trainer = fit(failing, SIZES, **options, callbacks=[gradients, recovery])
    assert_same_run(expected, (module, gradients.seen, trainer))
    assert module.net[stage + 1].calls > 2 * (4 + 4 + 4)
    assert recovery.events[-1].device == str(options["strategy"].devices[stage % devices])


# Bad input


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
    ],
)
def test_wrong_arguments(options, told):
    with pytest.raises(ConfigurationError, match=told):
        PipelineStrategy(**options)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"cut_before": ["a", "b"]}, r"cut_before must have 1 entries for 2 devices.*has 2: \['a', 'b'\]"),
        ({"link_speeds": [1000, 0]}, "link_speeds are MiB per second above 0"),
        ({"link_speeds": [1000]}, "link_speeds must have 2 entries for 2 devices"),
        ({"speeds": [1, 2, 3]}, "speeds must have 2 entries for 2 devices"),
        ({**LOOP, "cut_before": ["net.2"]}, "cut_before must have 3 entries for 2 devices, 2 on each, but has 1"),
        ({**LOOP, "speeds": [1] * 6}, "speeds must have 2 entries for 2 devices, 2 on each, but has 6"),
    ],
)
def test_arguments_that_do_not_fit_the_devices(options, told):
    with pytest.raises(ConfigurationError, match=told):
        quiet(**pipelined(2, **options))


def refused(
    module: Any, told: str, error: type[Exception] = ConfigurationError, stages: int = 2, **options: Any
) -> None:
    trainer = quiet(**pipelined(stages, **options))
    with pytest.raises(error, match=told):
        trainer.fit(module.double(), DataLoader(Batches([4]), batch_size=None))
    assert "forward" not in vars(module)


class Untraceable(Base):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(30, 9), nn.Linear(9, CLASSES)

    def forward(self, features: Any) -> Any:
        hidden = self.one(features.flatten(1))
        if hidden.sum() > 0:
            hidden = hidden * 2
        return self.other(hidden)


def test_a_network_that_cannot_be_followed():
    refused(Untraceable(), r"Untraceable.forward, line \d+: `if hidden.sum\(\) > 0:`.*nn.Sequential.*single_device")


def test_a_network_whose_only_block_cannot_be_followed():
    class Around(Base):
        def __init__(self) -> None:
            super().__init__()
            self.net = Untraceable()

        def forward(self, features: Any) -> Any:
            return self.net(features)

    refused(
        Around(),
        r"not enough for 2 stages.*'net' \(Untraceable\), which .* is one block.*Untraceable.forward, line \d+",
    )


def test_more_stages_than_blocks():
    class Small(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(30, CLASSES))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return nn.functional.cross_entropy(self.net(batch["features"].flatten(1)), batch["label"])

    refused(Small(), "has 1 block to cut between, which is not enough for 3 stages", stages=3)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("net.11", r"cut_before names 'net.11', which the network does not call. Did you mean 'net.1'"),
        ("nett.1", r"Did you mean 'net.1'"),
        ("zzz", r"which the network does not call. There are net, net.0, net.1"),
        ("net.0", "that is where it begins"),
    ],
)
def test_a_name_that_does_not_exist(name, told):
    refused(Mlp(), told, cut_before=[name])


def test_names_out_of_order():
    refused(Mlp(), "it comes before the cut named earlier", stages=3, cut_before=["net.3", "net.1"])


def test_a_cut_before_a_layer_that_writes_in_place():
    class InPlace(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.net[2] = nn.ReLU(inplace=True)

    refused(InPlace(), "what it begins with is changed in place", cut_before=["net.2"])


def test_the_modules_own_cuts():
    class Own(Mlp):
        def pipeline_cuts(self) -> list[str]:
            return ["net.3"]

    trainer = quiet(**pipelined(2))
    trainer.fit(Own().double(), DataLoader(Batches([4]), batch_size=None))
    assert trainer.connected_strategy.portable.strategy_state()["cut_before"] == ["net.3"]
    refused(Own(), "3 stages need 2 names to cut before, but there are 1", stages=3)


class Box:
    def __init__(self, value: Any) -> None:
        self.value = value


class Boxing(Base):
    """Two layers that exchange an object."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(30, 9)

        def forward(self, x: Any) -> Any:
            assert float(x.detach().sum()) is not None
            return Box(self.layer(x.flatten(1)))

    class Second(First):
        def forward(self, box: Any) -> Any:
            return self.layer(nn.functional.pad(box.value, (0, 21)))[:, :CLASSES]

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(self.First(), self.Second(), nn.Linear(CLASSES, CLASSES))

    def forward(self, features: Any) -> Any:
        return self.net(features)


def test_stages_that_exchange_objects():
    refused(Boxing(), "'net' stays whole, since it cannot be followed: .*First returns a Box, which may change",
            cut_before=["net.1"])  # fmt: skip


def test_a_network_that_is_called_with_an_object():
    class Called(Boxing):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(Box(batch["features"])).mean()

    refused(Called(), "The network is called with a Box, whose tensors a pipeline cannot see")


class Twice(Mlp):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self(batch["features"]) + self.net(batch["features"])).mean()


class Never(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(FEATURES, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.other(batch["features"]).mean()


def test_steps_that_call_the_network_twice_or_not_at_all():
    refused(Twice(), "calls the network twice.*torch.cat", StepError)
    refused(Never(), "did not call the network.*choose another strategy", StepError)


class Changing(Mlp):
    """Changes a weight or a gradient before or after its call of the network."""

    def __init__(self, change: Callable[[Any], Any], *, after: bool = False) -> None:
        super().__init__()
        self.change = change
        self.after = after

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx) if self.after else None
        with torch.no_grad():
            self.change(next(self.net.parameters()))
        return super().training_step(batch, batch_idx) if loss is None else loss


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    "change", [lambda weight: weight.clamp_(-0.1, 0.1), lambda weight: weight.data.mul_(0.9)], ids=["itself", "data"]
)
def test_steps_that_change_weights(change: Any, after: bool) -> None:
    refused(
        Changing(change, after=after), r"changes 'net\..*weight', .*once for each micro-batch.*in a hook", StepError
    )


def test_steps_that_change_gradients() -> None:
    def halve(weight: Any) -> None:
        if weight.grad is not None:
            weight.grad.mul_(0.5)

    run = quiet(**pipelined(2), accumulate_grad_batches=2)
    with pytest.raises(StepError, match=r"changes the gradient of 'net\..*weight'"):
        run.fit(Changing(halve).double(), DataLoader(Batches([4, 4]), batch_size=None))


class Slopes(Mlp):
    """Takes the gradients of the output, or of the loss, with respect to something."""

    def __init__(self, of_output: bool) -> None:
        super().__init__()
        self.of_output = of_output

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features = batch["features"].clone().requires_grad_()
        output = self(features)
        loss = output.square().mean()
        given = output if self.of_output else features
        slopes = torch.autograd.grad(output.pow(3).sum(), given, create_graph=True, allow_unused=True)[0]
        return loss if slopes is None else loss + slopes.square().mean()


def test_gradients_through_the_network_within_a_step() -> None:
    refused(Slopes(of_output=False), "takes gradients through the network.*with dp or ddp", StepError)
    # The graph after the network is whole.
    weights = []
    for options in ({"accelerator": "cpu", "devices": 1}, pipelined(2)):
        torch.manual_seed(0)
        module = Slopes(of_output=True).double()
        quiet(**options).fit(module, DataLoader(Batches([4, 4]), batch_size=None))
        weights.append(torch.cat([parameter.detach().flatten() for parameter in module.parameters()]))
    torch.testing.assert_close(*weights, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it compiles
def test_modules_that_want_to_do_it_themselves():
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

    class Compiled(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.net.compile()

    for make, told in ((ByHand, "optimises by hand"), (OwnBackward, "overrides `backward`")):
        refused(make(), told)
        # An evaluation has no backward.
        quiet(**pipelined(2)).predict(make().double(), DataLoader(Batches([4]), batch_size=None))
    refused(Compiled(), "is compiled.*Leave torch.compile out")


class SharedStatistics(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(30)
        self.one, self.other = nn.Linear(30, 30), nn.Linear(30, CLASSES)

    def forward(self, features: Any) -> Any:
        return self.other(self.norm(self.one(self.norm(features.flatten(1)))))


def test_shared_layers_with_statistics_cannot_have_copies():
    trainer = quiet(**pipelined(2, Copying, cut_before=["one"]))
    with pytest.raises(ConfigurationError, match=r"'norm' is used by two stages.*running statistics"):
        trainer.fit(SharedStatistics().double(), DataLoader(Batches([8]), batch_size=None))


def test_shared_layers_with_statistics_on_one_device():
    trainer = quiet(**pipelined(2, cut_before=["one"], micro_batches=2), sync_batchnorm=True)
    trainer.fit(SharedStatistics().double(), DataLoader(Batches([8]), batch_size=None))


def test_hooks_on_tied_weights_would_see_a_part():
    module = Tokens().double()
    module.net.embedding.weight.register_hook(lambda gradient: gradient)
    trainer = quiet(**pipelined(2, Copying))
    with pytest.raises(ConfigurationError, match="has a hook, which would see the gradient of one of them"):
        trainer.fit(module, DataLoader(Batches([8]), batch_size=None))


def test_memory_that_is_not_enough(monkeypatch):
    monkeypatch.setattr("equipoise.extensions.pipeline.planning.cut._RESERVE", 1e-9)
    refused(Mlp(), "No cut of the network fits into memory; the best would need: stage 0 on (cpu|cuda:0) ")


# Refusals that name a way out


class Asks(nn.Module):
    """Asks for a value, and so stays whole."""

    def __init__(self, width: int, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.layer, self.inner = nn.Linear(30, width), inner

    def forward(self, features: Any) -> Any:
        hidden = self.layer(features.flatten(1))
        hidden = hidden if self.inner is None else self.inner(hidden)
        return hidden * 2 if hidden.sum() > 1e9 else hidden


def refusal(*blocks: nn.Module) -> str:
    """The message for a network in so few blocks that three devices with two stages each cannot share them."""
    module = Mlp()
    module.net = nn.Sequential(*blocks)
    with pytest.raises(ConfigurationError, match="not enough for 6 stages") as raised:
        quiet(**pipelined(3, schedule="looped_bfs")).fit(module.double(), DataLoader(Batches(SIZES), batch_size=None))
    return str(raised.value)


def test_too_few_blocks_names_the_largest_that_stays_whole_and_is_not_in_another() -> None:
    told = refusal(Asks(30), Asks(30, Asks(60)), nn.Linear(60, CLASSES))
    assert "Give fewer devices or stages_per_device" in told
    assert "'net.1' (Asks), which has " in told
    assert "Asks.forward, line" in told
    assert "`return hidden * 2 if hidden.sum() > 1e9 else hidden`" in told


def test_one_block_is_not_told_to_take_fewer_devices() -> None:
    told = refusal(Asks(CLASSES))
    assert "fewer devices" not in told
    assert "choose another strategy, such as 'dp' or 'ddp'" in told


class Packing(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.LSTM(6, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        lengths = torch.tensor([2] * len(batch["features"]))
        packed = nn.utils.rnn.pack_padded_sequence(batch["features"], lengths, batch_first=True)
        return self.net(packed)[1][0].sum()


def test_a_packed_sequence_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"called with a PackedSequence.*pack within a submodule"):
        quiet(**pipelined(2)).fit(Packing().double(), DataLoader(Batches(SIZES), batch_size=None))
