"""Networks whose forward cannot be followed are cut between the layers of a stack, and train as on one device."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from equipoise import ConfigurationError, OOMRecovery, PipelineStrategy, Trainer
from equipoise.extensions.pipeline import network
from equipoise.extensions.pipeline.planning.cut import Cut
from equipoise.extensions.pipeline.planning.stage_costs import Stage
from equipoise.extensions.pipeline.schedule.schedule import SCHEDULES
from equipoise.extensions.pipeline.stack.stack_pipeline import StackPipeline
from tests.support.pipelines import quiet

FEATURES, WIDTH, LAYERS = 4, 8, 6


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
        self.register_buffer("calls", torch.zeros(()))

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


class Module(L.LightningModule):
    def __init__(self, network: Callable[[], nn.Module] = Network) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.net = network()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.net(batch[0]).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02)


def fit(
    strategy: Any,
    devices: int,
    make: Callable[[], L.LightningModule] = Module,
    *,
    ckpt_path: Any = None,
    **options: Any,
) -> tuple[Any, Trainer]:
    values = torch.randn(26, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    data = TensorDataset(values)
    module = make()
    trainer = quiet(strategy=strategy, devices=["cpu"] * devices, **{"max_epochs": 2, **options})
    trainer.fit(module, DataLoader(data, 8), DataLoader(data, 8), ckpt_path=ckpt_path)
    return module, trainer


def same(actual: tuple[Any, Trainer], expected: tuple[Any, Trainer], tolerance: float = 1e-12) -> None:
    weights = dict(actual[0].named_parameters())
    for name, parameter in expected[0].named_parameters():
        torch.testing.assert_close(weights[name], parameter, rtol=tolerance, atol=tolerance, msg=name)
    values = {name: float(value) for name, value in actual[1].callback_metrics.items()}
    assert values == pytest.approx({name: float(value) for name, value in expected[1].callback_metrics.items()})


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("threads", [False, True])
def test_weights_are_those_of_one_device(schedule: str, threads: bool) -> None:
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    strategy = PipelineStrategy(schedule=schedule, micro_batches=3, threads=threads)
    same(fit(strategy, 2, **options), fit("single_device", 1, **options))


def test_the_table_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        fit(PipelineStrategy(cut_before=["net.layers.2"]), 2, max_epochs=1)
    assert "stages begin at its layers, since Network.forward, line" in caplog.text
    assert re.search(r"1  \S+ +net\.layers\.2", caplog.text)


class Checkpointed(Network):
    """Keeps no values of its layers, and computes them again in the backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def call_layer(self, layer: nn.Module, hidden: Tensor, mask: Tensor) -> Any:
        return checkpoint(partial(layer, mask=mask), hidden, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("cut_before", [None, ["net.layers.2", "net.layers.4"]])
def test_layers_with_activation_checkpointing(cut_before: list[str] | None) -> None:
    strategy = PipelineStrategy(cut_before=cut_before, micro_batches=3)
    make = partial(Module, partial(Checkpointed, False))
    same(fit(strategy, 3, make), fit("single_device", 1, make))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("cut_before", [None, ["net.layers.2", "net.layers.4"]])
def test_reentrant_checkpointing_is_refused(cut_before: list[str] | None) -> None:
    make = partial(Module, partial(Checkpointed, True))
    with pytest.raises(ConfigurationError, match="use_reentrant=True cannot compute the gradients of a stage"):
        fit(PipelineStrategy(cut_before=cut_before), 3, make)


class CheckpointedDropout(Checkpointed):
    """Draws random numbers in layers that the backward computes again."""

    def __init__(self) -> None:
        super().__init__(use_reentrant=False)
        for layer in self.layers:
            layer.register_forward_hook(lambda layer, args, output: (nn.functional.dropout(output[0], 0.5), output[1]))


def test_checkpointed_layers_with_dropout_are_for_one_device() -> None:
    """Checkpointing restores the generators of the devices on which arguments lie, not those of the layers."""
    make = partial(Module, CheckpointedDropout)
    strategy = PipelineStrategy(cut_before=["net.layers.2"], micro_batches=1)
    if torch.cuda.is_available():
        with pytest.raises(ConfigurationError, match="draw random numbers within activation checkpointing"):
            fit(strategy, 2, make)
    else:
        expected = fit("single_device", 1, make, num_sanity_val_steps=0)
        same(fit(strategy, 2, make, num_sanity_val_steps=0), expected)


class CallsLayer(Module):
    """Calls a layer beside its network, which notes that in a list."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        notes: list[str] = []
        layer = self.net.layers[0]
        handle = layer.register_forward_pre_hook(
            lambda layer, args, kwargs: kwargs.pop("notes", []).append("called"), with_kwargs=True
        )
        hidden = torch.ones(2, WIDTH, dtype=batch[0].dtype, device=layer.linear.weight.device)
        layer(hidden, mask=hidden, notes=notes)
        handle.remove()
        assert notes == ["called"]
        return super().training_step(batch, batch_idx)


def test_a_layer_that_is_called_beside_the_network() -> None:
    fit(PipelineStrategy(cut_before=["net.layers.2"]), 2, CallsLayer, max_epochs=1)


class Shallow(Module):
    """Calls fewer layers in later epochs, so that a stage may have none to compute."""

    def on_train_epoch_start(self) -> None:
        self.net.depth = 1 if self.current_epoch else LAYERS


def test_layers_that_are_left_out() -> None:
    strategy = PipelineStrategy(cut_before=["net.layers.2", "net.layers.4"])
    same(fit(strategy, 3, Shallow, max_epochs=3), fit("single_device", 1, Shallow, max_epochs=3))


class Whole(nn.Module):
    """A network whose encoder cannot be followed and has nearly all of the work."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Network(8)
        self.head = nn.Linear(1, 1)

    def forward(self, value: Tensor) -> Tensor:
        return self.head(self.encoder(value))


def test_a_stack_within_a_module_that_stays_whole(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> Module:
        return Module(Whole)

    # Times on a busy machine decide nothing here.
    monkeypatch.setattr(network, "_UNBALANCED", 0.0)
    monkeypatch.setattr(network, "_MUCH_QUICKER", float("inf"))
    with caplog.at_level("INFO"):
        actual = fit(PipelineStrategy(), 2, make)
    same(actual, fit("single_device", 1, make))
    assert "stages of recorded calls are unbalanced: 'encoder' stays whole" in caplog.text


def test_its_cut_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_UNBALANCED", 0.0)
    monkeypatch.setattr(network, "_MUCH_QUICKER", float("inf"))
    strategy = PipelineStrategy()
    fit(strategy, 2, lambda: Module(Whole), max_epochs=1)
    cut = strategy.portable.strategy_state()["cut_before"]
    fit(strategy, 2, lambda: Module(Whole), max_epochs=1)
    assert strategy.portable.strategy_state()["cut_before"] == cut


@pytest.mark.parametrize(
    ("seconds", "opaque", "found"),
    [
        ([0.9, 0.1], {"gate": "it logs", "encoder": "it counts"}, "'encoder' stays whole, because it counts"),
        ([0.7, 0.3], {"encoder": "it counts"}, ""),
        ([0.9, 0.1], {}, ""),
        ([], {"encoder": "it counts"}, ""),
    ],
)
def test_stages_that_are_unbalanced(seconds: list[float], opaque: dict[str, str], found: str) -> None:
    stages = [
        Stage(first=0, end=1, forward=each / 3, backward=each * 2 / 3, memory=0, parameters=0) for each in seconds
    ]
    cut = Cut(ends=[1, 2], first_blocks=["", "b"], first_calls=["", "b"], stages=stages, idle=0.0)
    parts = nn.ModuleDict({"gate": nn.Linear(1, 1), "encoder": nn.Linear(9, 9)})
    traced: Any = Mock(opaque=opaque, root=nn.ModuleDict({"network": parts}))
    reason = network._imbalance(cut, traced)
    assert found in reason
    assert bool(reason) == bool(found)


# Runs


def test_a_run_is_resumed(tmp_path: Path) -> None:
    """The cut that a checkpoint holds is used again."""
    expected = fit(PipelineStrategy(), 2)
    keep = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    fit(PipelineStrategy(), 2, callbacks=[keep], enable_checkpointing=True, max_steps=3)
    keep = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    again = {"callbacks": [keep], "enable_checkpointing": True, "ckpt_path": tmp_path / "step=3.ckpt"}
    same(fit(PipelineStrategy(), 2, **again), expected)


class Breaks(Layer):
    def forward(self, hidden: Tensor, *, mask: Tensor) -> tuple[Tensor, Tensor]:
        raise ZeroDivisionError("on purpose")


@pytest.mark.parametrize("threads", [False, True])
def test_an_error_in_a_layer(threads: bool) -> None:
    def make() -> Module:
        module = Module()
        failing = Breaks.forward.__get__(module.net.layers[3])
        calls = []

        def fail_later(hidden: Tensor, *, mask: Tensor) -> Any:
            calls.append(0)
            if len(calls) > 8:
                return failing(hidden, mask=mask)
            return Layer.forward(module.net.layers[3], hidden, mask=mask)

        module.net.layers[3].forward = fail_later  # type: ignore[method-assign]
        return module

    with pytest.raises(ZeroDivisionError, match="on purpose") as caught:
        fit(PipelineStrategy(cut_before=["net.layers.2"], threads=threads), 2, make, num_sanity_val_steps=0)
    assert "This was stage 1 of the pipeline, on " in "".join(caught.value.__notes__)


@pytest.mark.filterwarnings("ignore:.*memory")
def test_a_batch_that_does_not_fit() -> None:
    failures = []

    def make() -> Module:
        module = Module()
        layer = module.net.layers[4]

        def forward(hidden: Tensor, *, mask: Tensor) -> Any:
            if torch.is_grad_enabled() and len(hidden) > 2:
                failures.append(len(hidden))
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return Layer.forward(layer, hidden, mask=mask)

        layer.forward = forward  # type: ignore[method-assign]
        return module

    options = {"cut_before": ["net.layers.2"], "micro_batches": 2}
    actual = fit(PipelineStrategy(**options), 2, make, callbacks=[OOMRecovery()], num_sanity_val_steps=0)
    assert failures
    same(actual, fit("single_device", 1, num_sanity_val_steps=0))


# What is refused


class NoStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(FEATURES, 3), nn.Linear(3, 1)

    def forward(self, value: Tensor) -> Tensor:
        hidden = self.one(value)
        if float(self.one.weight.detach().norm()) > 1e9:
            raise ValueError("The weights have diverged.")
        return self.other(hidden)


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


@pytest.mark.parametrize("network_class", [KeepsAttribute, KeepsList])
def test_a_forward_that_keeps_something_is_refused(network_class: type[Network]) -> None:
    with pytest.raises(ConfigurationError, match="cannot be cut into stages"):
        fit(PipelineStrategy(), 2, lambda: Module(network_class))


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: Module(NoStack), {}),
        (lambda: Module(lambda: Network(2)), {"stages_per_device": 2, "schedule": "interleaved_1f1b"}),
        (Module, {"cut_before": ["net.last"]}),
    ],
)
def test_networks_without_enough_layers(make: Callable[[], Module], options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot be cut into stages: .*asks for values"):
        fit(PipelineStrategy(**options), 2, make)


def test_processes_need_recorded_calls() -> None:
    with pytest.raises(ConfigurationError, match="Or take engine='threads', which begins stages at the layers"):
        fit(PipelineStrategy(engine="processes", timeout=60.0), 2)


def test_stages_of_layers_are_used() -> None:
    class Watched(PipelineStrategy):
        def teardown(self, error: BaseException | None = None) -> None:
            assert self._run is not None
            found.append(self._run.network.running)
            super().teardown(error)

    found: list[Any] = []
    fit(Watched(), 2, max_epochs=1)
    assert isinstance(found[0], StackPipeline)
    assert len(found[0].timeline.spans) > 0
