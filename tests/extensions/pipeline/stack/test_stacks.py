"""Networks whose forward cannot be followed are cut between the layers of a stack, and train as on one device."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from equipoise import ConfigurationError, OOMRecovery
from equipoise.extensions.pipeline import network
from equipoise.extensions.pipeline.schedule.schedule import SCHEDULES
from tests.support.batches import FEATURES
from tests.support.networks.layers import Task
from tests.support.networks.layers import network as written
from tests.support.one_device import on_one_device
from tests.support.pipelines import EachStep, assert_as_on_one_device, assert_same, fit, pipelined

WIDTH, LAYERS = 8, 6


class Layer(nn.Module):
    """A residual layer that receives more than one tensor and returns more than one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, hidden: Tensor, *, mask: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.norm(hidden + torch.tanh(self.linear(hidden)) * mask)
        return hidden, hidden.mean(-1)


class Network(nn.Module):
    """Asks for values in its own forward, and chooses how many layers it calls. A weight is used at both ends."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(WIDTH))
        self.first = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.last = nn.Linear(WIDTH, 1)
        self.depth = layers
        self.register_buffer("calls", torch.zeros(()), persistent=False)  # one for each micro-batch

    def forward(self, value: Tensor) -> Tensor:
        self.calls += 1
        if float(self.first.weight.detach().norm()) > 1e9:
            raise ValueError("The weights have diverged.")
        hidden = self.first(value) + self.offset
        mask = torch.ones_like(hidden)
        means = []
        for layer in self.layers[: self.depth]:
            hidden, mean = self.call_layer(layer, hidden, mask)
            means.append(mean)
        # A value of every layer passes by the later ones.
        total = torch.stack(means).sum(0).unsqueeze(-1)
        return self.last(functional_of(hidden, self.first.weight)) + total

    def call_layer(self, layer: nn.Module, hidden: Tensor, mask: Tensor) -> Any:
        return layer(hidden, mask=mask)


def functional_of(hidden: Tensor, weight: Tensor) -> Tensor:
    """Use the first layer's weight once more, behind the stack."""
    return hidden + nn.functional.linear(nn.functional.linear(hidden, weight.t()), weight)


class Module(Task):
    def __init__(self, network: Callable[[], nn.Module] = Network) -> None:
        super().__init__(network())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(batch["features"]).square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss


CUT = {"cut_before": ["net.layers.2"]}


@pytest.mark.quick_cases(5)
@pytest.mark.thorough
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("threads", [False, True])
def test_gradients_are_those_of_one_device(schedule: str, threads: bool) -> None:
    plan = pipelined(2, schedule=schedule, micro_batches=3, threads=threads)
    assert_as_on_one_device(Module, plan, accumulate_grad_batches=2, gradient_clip_val=0.5)


def test_the_table_says_that_stages_begin_at_layers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        run = fit(Module, max_epochs=1, **pipelined(2, **CUT))
    assert "stages begin at its layers, since Network.forward, line" in caplog.text
    assert re.search(r"1  \S+ +net\.layers\.2", caplog.text)
    assert len(run.trainer.connected_strategy.timeline.spans) > 0


class Checkpointed(Network):
    """Keeps no values of its layers, and computes them again in the backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def call_layer(self, layer: nn.Module, hidden: Tensor, mask: Tensor) -> Any:
        return checkpoint(partial(layer, mask=mask), hidden, use_reentrant=self.use_reentrant)


@pytest.mark.thorough
@pytest.mark.parametrize("cut_before", [None, ["net.layers.2", "net.layers.4"]])
def test_layers_with_activation_checkpointing(cut_before: list[str] | None) -> None:
    assert_as_on_one_device(
        partial(Module, partial(Checkpointed, False)), pipelined(3, cut_before=cut_before, micro_batches=3)
    )


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("cut_before", [None, ["net.layers.2", "net.layers.4"]])
def test_reentrant_checkpointing_is_refused(cut_before: list[str] | None) -> None:
    with pytest.raises(ConfigurationError, match="use_reentrant=True cannot compute the gradients of a stage"):
        fit(partial(Module, partial(Checkpointed, True)), **pipelined(3, cut_before=cut_before))


class CheckpointedDropout(Checkpointed):
    """Draws random numbers in layers that the backward computes again."""

    def __init__(self) -> None:
        super().__init__(use_reentrant=False)
        for layer in self.layers:
            layer.register_forward_hook(lambda layer, args, output: (nn.functional.dropout(output[0], 0.5), output[1]))


@pytest.mark.thorough
def test_checkpointed_layers_with_dropout_are_for_one_device() -> None:
    """Checkpointing restores the generators of the devices on which arguments lie, not those of the layers."""
    make, plan = partial(Module, CheckpointedDropout), pipelined(2, micro_batches=1, **CUT)
    if torch.cuda.is_available():
        with pytest.raises(ConfigurationError, match="draw random numbers within activation checkpointing"):
            fit(make, **plan)
    else:
        assert_as_on_one_device(make, plan)


class Shallow(Module):
    """Calls fewer layers in later epochs, so that a stage may have none to compute."""

    def on_train_epoch_start(self) -> None:
        self.net.depth = 1 if self.current_epoch else LAYERS


@pytest.mark.thorough
def test_layers_that_are_left_out() -> None:
    assert_as_on_one_device(Shallow, pipelined(3, cut_before=["net.layers.2", "net.layers.4"]), max_epochs=3)


def whole() -> Module:
    """A network whose encoder cannot be followed and has nearly all of the work."""

    def forward(self: Any, value: Tensor) -> Tensor:
        return self.head(self.encoder(value))

    return Module(lambda: written(forward, encoder=Network(8), head=nn.Linear(1, 1)))


@pytest.mark.thorough
def test_a_stack_within_a_module_that_stays_whole(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cut is used again."""
    # Times on a busy machine decide nothing here.
    monkeypatch.setattr(network, "_UNBALANCED", 0.0)
    monkeypatch.setattr(network, "_MUCH_QUICKER", float("inf"))
    plan = pipelined(2)
    with caplog.at_level("INFO"):
        assert_as_on_one_device(whole, plan)
    assert "stages of recorded calls are unbalanced: 'encoder' stays whole" in caplog.text
    cut = plan["strategy"].portable.strategy_state()["cut_before"]
    fit(whole, max_epochs=1, **plan)
    assert plan["strategy"].portable.strategy_state()["cut_before"] == cut


# Runs


@pytest.mark.thorough
def test_a_run_goes_on_with_the_cut_of_its_checkpoint(tmp_path: Path) -> None:
    expected = fit(Module, callbacks=[EachStep(tmp_path)], **pipelined(2))
    resumed = fit(Module, ckpt_path=tmp_path / "step=3.ckpt", **pipelined(2))
    assert_same(expected._replace(gradients=[]), resumed)


def failing(layer: int, fail: Callable[[Tensor], None]) -> Callable[[], Module]:
    """Make modules of which one layer may raise an error for what it receives."""

    def make() -> Module:
        module = Module()

        def forward(hidden: Tensor, *, mask: Tensor) -> Any:
            fail(hidden)
            return Layer.forward(module.net.layers[layer], hidden, mask=mask)

        module.net.layers[layer].forward = forward  # type: ignore[method-assign]
        return module

    return make


@pytest.mark.parametrize("threads", [False, True])
def test_an_error_in_a_layer_names_the_stage(threads: bool) -> None:
    calls = []

    def fail(hidden: Tensor) -> None:
        calls.append(0)
        if len(calls) > 8:
            raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError, match="on purpose") as caught:
        fit(failing(3, fail), **pipelined(2, threads=threads, **CUT))
    assert "This was stage 1 of the pipeline, on " in "".join(caught.value.__notes__)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*memory")
def test_a_batch_that_does_not_fit_is_done_again() -> None:
    failures = []

    def fail(hidden: Tensor) -> None:
        if torch.is_grad_enabled() and len(hidden) > 2:
            failures.append(len(hidden))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    actual = fit(failing(4, fail), callbacks=[OOMRecovery()], **pipelined(2, micro_batches=2, **CUT))
    assert failures
    assert_same(on_one_device(Module), actual)


# Refusals


def without_stack() -> Module:
    def forward(self: Any, value: Tensor) -> Tensor:
        hidden = self.one(value)
        if float(self.one.weight.detach().norm()) > 1e9:
            raise ValueError("The weights have diverged.")
        return self.other(hidden)

    return Module(lambda: written(forward, one=nn.Linear(FEATURES, 3), other=nn.Linear(3, 1)))


class KeepsAttribute(Network):
    """Passes a mask to its layers by an attribute, which the next micro-batch would overwrite."""

    def forward(self, value: Tensor) -> Tensor:
        self.mask = value.sum(-1, keepdim=True) > 0
        return super().forward(value) * self.mask


class KeepsList(Network):
    """Collects values in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.means: list[Tensor] = []

    def forward(self, value: Tensor) -> Tensor:
        self.means.append(value.mean())
        return super().forward(value) * self.means[-1]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (partial(Module, KeepsAttribute), {}, "cannot be cut into stages"),
        (partial(Module, KeepsList), {}, "cannot be cut into stages"),
        (without_stack, {}, "cannot be cut into stages: .*asks for values"),
        # Not enough layers.
        (lambda: Module(lambda: Network(2)), {"schedule": "interleaved_1f1b"}, "cannot be cut .*asks for values"),
        (Module, {"cut_before": ["net.last"]}, "cannot be cut into stages: .*asks for values"),
        (Module, {"engine": "processes"}, "Or take engine='threads', which begins stages at the layers"),
    ],
    ids=["keeps an attribute", "keeps a list", "no stack", "few layers", "a cut elsewhere", "processes"],
)
def test_networks_that_cannot_be_cut_at_layers_are_refused(
    make: Callable[[], Module], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        fit(make, **pipelined(2, timeout=60.0, **options))
