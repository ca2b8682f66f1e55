"""A network in stages: gradients, logs, outputs and state are those of one device."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from equipoise import PipelineStrategy
from tests.extensions.pipeline.strategy import networks
from tests.support.batches import CLASSES, SIZES, VOCABULARY, Batches
from tests.support.equality import assert_equal
from tests.support.networks.layers import WIDTH
from tests.support.networks.transparency import Masked, MaskedOnTheHost, Mlp, Tied
from tests.support.one_device import OPTIONS
from tests.support.pairs import pairwise
from tests.support.pipelines import (
    Copying,
    Tokens,
    assert_as_on_one_device,
    assert_same,
    assert_timeline,
    fit,
    pipelined,
    processes,
    quiet,
)
from tests.support.trainer_runs import with_optimizers

pytestmark = pytest.mark.usefixtures("no_thread_is_left")

INTERLEAVED = ["interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble"]


# Schedules with numbers of devices and of stages on each.
PLANS = [
    *(("gpipe", 3, 1), ("1f1b", 2, 1), ("1f1b", 4, 1), ("looped_bfs", 2, 2), ("interleaved_1f1b", 2, 3)),
    *(("interleaved_1f1b", 3, 2), ("interleaved_zero_bubble", 1, 1), ("interleaved_zero_bubble", 3, 1)),
    ("interleaved_zero_bubble", 2, 2),
]


@pytest.mark.quick_cases(9)
@pytest.mark.thorough
@pytest.mark.parametrize(("plan", "micro_batches", "threads"), pairwise(PLANS, [1, 2, 5, 13], [None, True]))
def test_gradients_are_those_of_one_device_with_each_schedule(plan, micro_batches, threads):
    """Tied weights, skips, containers between stages, masked tokens, batches of fewer samples than micro-batches."""
    schedule, devices, each = plan
    options = {"micro_batches": micro_batches, "stages_per_device": each, "threads": threads}
    run = assert_as_on_one_device(Tokens, pipelined(devices, schedule=schedule, **options), val=(4, 3))
    timeline = run.trainer.connected_strategy.timeline
    assert_timeline(timeline, schedule, devices, min(micro_batches, SIZES[-1]), each)


# Networks


def itself() -> Any:
    return Tokens(by_self=True)


NETWORKS = {
    **{make.__name__: make for make in (Mlp, Masked, MaskedOnTheHost)},
    "the module itself": itself,
    "nested tuples": networks.nested_tuples,
    "transformer": networks.Transformer,
    "whole blocks": networks.whole_blocks,
    "size as argument": networks.size_as_argument,
}


@pytest.mark.quick_cases(6)
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
def test_networks_of_all_kinds_are_cut_automatically(make):
    assert_as_on_one_device(make, pipelined(2, Copying, micro_batches=4))


DIVISIBLE = [Tied, networks.frozen, networks.trained_before, networks.shared_layer, networks.in_place]


@pytest.mark.quick_cases(4)
@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("make", "strategy", "schedule"), pairwise(DIVISIBLE, [PipelineStrategy, Copying], INTERLEAVED)
)
def test_several_stages_on_each_device(make, strategy, schedule):
    assert_as_on_one_device(make, pipelined(2, strategy, micro_batches=4, schedule=schedule))


@pytest.mark.thorough
@pytest.mark.parametrize("plan", [pipelined, processes])
def test_a_cut_within_a_layer_that_is_one_call_in_an_evaluation(plan):
    cut_before = ["net.layers.1.linear1"]
    options = plan(2, micro_batches=2, cut_before=cut_before)
    run = assert_as_on_one_device(networks.Transformer, options, sizes=(13, 5), val=(7,))
    assert run.trainer.connected_strategy.portable.strategy_state()["cut_before"] == cut_before


# The shared layer is called in four stages, on two devices.
FOUR_STAGES = {"cut_before": ["net.other", "tanh_2", "tanh_3"], "schedule": "interleaved_1f1b"}


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("threads", [None, True])
@pytest.mark.parametrize(
    ("make", "devices", "options"),
    [(Tokens, 3, {}), (networks.shared_layer, 2, FOUR_STAGES)],
)
def test_each_device_has_one_copy_of_a_tied_layer(make, devices, options, threads):
    plan = pipelined(devices, Copying, micro_batches=3, threads=threads, **options)
    assert_as_on_one_device(make, plan, accumulate_grad_batches=2)


class Sparse(Mlp):
    """The gradients of its embedding are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.EmbeddingBag(VOCABULARY, 6, sparse=True), nn.Tanh(), nn.Linear(6, CLASSES))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.net(batch["tokens"]), batch["label"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("plan", "schedule"), [(pipelined, "1f1b"), (pipelined, "interleaved_zero_bubble"), (processes, "1f1b")]
)
def test_sparse_gradients(plan, schedule):
    options = plan(2, micro_batches=2, schedule=schedule, stages_per_device=1)
    assert_as_on_one_device(Sparse, options, sizes=(13, 5))


class Noting(nn.Linear):
    """Notes the weights with which it computes, and is one call for the pipeline, since it asks for a value."""

    computed: set[int] = set()

    def forward(self, features):
        assert bool(features.isfinite().all())
        self.computed.add(self.weight.data_ptr())
        return super().forward(features)


class CalledTwice(Mlp):
    """Its largest child is a layer that two stages call; the network is the module itself."""

    def __init__(self) -> None:
        super().__init__()
        del self.net
        self.one = Noting(WIDTH, WIDTH)
        self.other, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, features):
        hidden = torch.tanh(self.other(torch.tanh(self.one(features.flatten(1)))))
        return self.head(torch.tanh(self.one(hidden)))

    def on_train_epoch_start(self) -> None:
        Noting.computed.clear()  # in the first epoch also with weights that were lent to a device for a check


def test_a_later_stage_computes_the_largest_child_with_its_own_copy():
    expected = fit(CalledTwice)
    assert_same(expected, fit(CalledTwice, **pipelined(2, Copying, micro_batches=2, cut_before=["other"])))
    assert len(Noting.computed) == 2


@pytest.mark.parametrize("cut_before", [["net.3"], None])
def test_a_first_call_may_create_submodules(cut_before):
    assert_as_on_one_device(networks.late, pipelined(2, micro_batches=2, cut_before=cut_before))


def test_a_tensor_that_passes_a_cut_twice_gets_both_gradients():
    assert_as_on_one_device(networks.passed_twice, pipelined(3, micro_batches=2, cut_before=["mul", "net.head"]))


def constants_on_the_cpu() -> Any:
    return networks.constants(lambda x: None)


def constants_beside_the_input() -> Any:
    return networks.constants(lambda x: x.device)


def test_tensors_that_the_forward_makes_by_itself():
    assert_as_on_one_device(constants_on_the_cpu, pipelined(2))


def test_tensors_that_the_forward_makes_on_the_device_of_its_input():
    assert_as_on_one_device(constants_beside_the_input, pipelined(2, micro_batches=2, cut_before=["net.two"]))


# Steps


@pytest.mark.thorough
@pytest.mark.parametrize("options", [name for name in OPTIONS if name != "plain"])
def test_accumulated_and_clipped_gradients(options):
    assert_as_on_one_device(Tokens, pipelined(3, micro_batches=5, schedule="1f1b"), **OPTIONS[options])


def scheduled(module: Any) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


OPTIMIZERS = {
    "a rate that each step lowers": scheduled,
    "LBFGS": lambda module: torch.optim.LBFGS(module.parameters(), max_iter=3),
    "a state from the start": lambda module: torch.optim.Adagrad(module.parameters(), 0.1, initial_accumulator_value=1),
}


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_and_schedulers(name):
    def make() -> Any:
        return with_optimizers(OPTIMIZERS[name], Mlp)

    assert_as_on_one_device(make, pipelined(2, micro_batches=3), 1e-10 if name == "LBFGS" else 1e-12)


class Skipping(Mlp):
    """Skips samples: parts of a batch, before or after the network is called, and whole batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        chosen = batch["label"] > 0
        if batch_idx == 2 or not chosen.any():
            return None
        logits = self(batch["features"])
        loss = nn.functional.cross_entropy(logits[chosen], batch["label"][chosen])
        if loss > 1e9:
            return None
        return {"loss": loss, "loss_weight": chosen.sum(), "logits": logits.detach()}


def test_steps_that_skip_samples():
    """Micro-batches of one sample, most of which are skipped."""
    assert_as_on_one_device(Skipping, pipelined(2, micro_batches=13))


class Measured(Mlp):
    """Metrics in the module, and a dictionary that `on_train_batch_end` reads."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(CLASSES)
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch["features"])
        self.accuracy.update(logits, batch["label"])
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return {"loss": nn.functional.cross_entropy(logits, batch["label"]), "logits": logits.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(outputs["logits"])


def test_metrics_and_outputs_of_steps():
    expected, run = fit(Measured), assert_as_on_one_device(Measured, pipelined(2, micro_batches=4))
    assert_equal(expected.module.seen, run.module.seen, 1e-12)


class Halving(Mlp):
    """Halves all gradients after each backward, when it has noted them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_after_backward(self) -> None:
        # Parts of a pipeline lie on several devices.
        self.seen.append([parameter.grad.cpu().clone() for parameter in self.parameters()])
        for parameter in self.parameters():
            parameter.grad.mul_(0.5)


@pytest.mark.parametrize(("window", "schedule"), [(1, "interleaved_zero_bubble"), (2, "1f1b")])
def test_a_hook_after_the_backward_sees_the_gradients_of_one_device_once(window, schedule):
    plan = pipelined(2, micro_batches=2, schedule=schedule, stages_per_device=1)
    run = assert_as_on_one_device(Halving, plan, accumulate_grad_batches=window)
    assert len(run.module.seen) == 2 * len(SIZES)
    assert_equal(fit(Halving, accumulate_grad_batches=window).module.seen, run.module.seen, 1e-12)


class BeforeBackward(L.Callback):
    """Notes the losses of each batch that `on_before_backward` receives."""

    def __init__(self):
        self.losses = []

    def on_train_batch_start(self, *args):
        self.losses.append([])

    def on_before_backward(self, trainer, module, loss):
        self.losses[-1].append(loss.item())


def test_on_before_backward_fires_for_each_micro_batch_with_its_share_of_the_loss():
    whole, parts = BeforeBackward(), BeforeBackward()
    fit(Mlp, sizes=(8, 8), callbacks=[whole])
    fit(Mlp, **pipelined(2, micro_batches=4), sizes=(8, 8), callbacks=[parts])
    assert [len(losses) for losses in whole.losses] == [1, 1] * 2
    assert [len(losses) for losses in parts.losses] == [4, 4] * 2
    assert_equal([sum(losses) for losses in whole.losses], [sum(losses) for losses in parts.losses], 1e-12)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision(precision):
    options = {"precision": precision, "max_epochs": 1, "sizes": (8, 8)}
    assert_as_on_one_device(Mlp, pipelined(2, micro_batches=1), 1e-6, **options)
    assert_as_on_one_device(Mlp, pipelined(2, micro_batches=4, threads=True), 0.05, **options)


# Evaluations


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("plan", [{}, {"schedule": "interleaved_1f1b", "stages_per_device": 3}])
def test_evaluations_are_those_of_one_device_to_the_bit(plan):
    loader = DataLoader(Batches([5, 3]), batch_size=None)
    module, _, trainer = fit(Tokens, max_epochs=1)
    other = quiet(**pipelined(2, **plan))
    results = [
        [run.validate(module, loader, verbose=False), run.test(module, loader, verbose=False)]
        for run in (trainer, other)
    ]
    assert results[0] == results[1]
    for one, another in zip(trainer.predict(module, loader), other.predict(module, loader), strict=True):
        assert torch.equal(one, another)


def test_a_module_is_evaluated_first_and_trained_then():
    module = Tokens().double()
    trainer = quiet(**pipelined(2, micro_batches=4))
    loader = DataLoader(Batches([5, 3]), batch_size=None)
    trainer.validate(module, loader, verbose=False)
    trainer.fit(module, loader)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader)
    assert "forward" not in vars(module)
    assert "forward" not in vars(module.net)


def test_a_forward_that_the_user_has_set_on_the_instance_returns_after_the_run():
    module = Mlp().double()
    inner = list(module.net)

    def forward(features: Any) -> Any:
        for layer in inner:
            features = layer(features)
        return features

    module.net.forward = forward
    quiet(**pipelined(2, micro_batches=2)).fit(module, DataLoader(Batches([5]), batch_size=None))
    assert module.net.forward is forward


class Training(Tokens):
    """A forward outside of the step, with gradients."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        before = {name: parameter.grad for name, parameter in self.named_parameters()}
        self.zero_grad()
        self(batch["tokens"]).square().mean().backward()
        self.found = {name: parameter.grad for name, parameter in self.named_parameters()}
        for name, parameter in self.named_parameters():
            parameter.grad = before[name]


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", [PipelineStrategy, Copying])
def test_gradients_pass_through_a_forward_outside_of_the_step(strategy):
    run = assert_as_on_one_device(Training, pipelined(3, strategy, micro_batches=2))
    assert_equal(fit(Training).module.found, run.module.found, 1e-11)


class NotesTheDevice(Tokens):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.loss_device = (outcome := super().training_step(batch, batch_idx))["loss"].device
        return outcome


def test_the_loss_is_computed_on_the_last_device():
    """Devices differ where they are simulated or GPUs."""
    run = fit(NotesTheDevice, **pipelined(2))
    assert run.module.loss_device == run.trainer.connected_strategy.devices[-1]


# Random numbers


def test_dropout_draws_the_same_masks_with_the_same_cut_and_others_with_another():
    cuts = ("net.3", "net.3", "net.1")
    first, again, other = (fit(networks.dropping, **pipelined(2, cut_before=[cut], micro_batches=4)) for cut in cuts)
    assert_same(first, again, 0.0)
    assert not torch.allclose(first.module.net[1][0].weight, other.module.net[1][0].weight)
