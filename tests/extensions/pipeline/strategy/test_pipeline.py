"""A network in stages: gradients, logs, outputs and state are those of one device."""

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from equipoise import PipelineStrategy
from equipoise.extensions.pipeline.schedule.schedule import actions_of
from tests.support.batches import CLASSES, FEATURES, TOKENS, VOCABULARY, Batches
from tests.support.networks.transparency import Base, Convolution, Masked, MaskedOnTheHost, Mlp, Recurrent, Tied
from tests.support.one_device import assert_same_run
from tests.support.pairs import pairwise
from tests.support.pipelines import Copying, Tokens, fit, pipelined, quiet

SIZES = [13, 13, 5, 13, 2]
INTERLEAVED = ["interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble"]
REFERENCES: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("equipoise")] == []


def reference(make: Any, **options: Any) -> Any:
    """The run on one device, made once."""
    key = f"{make.__qualname__} {options}"
    if key not in REFERENCES:
        REFERENCES[key] = fit(make, SIZES, **options)
    return REFERENCES[key]


def looped(devices: int, each: int = 2, strategy: Any = PipelineStrategy, **options: Any) -> dict[str, Any]:
    """Arguments of a trainer with several stages on each device."""
    given = {"schedule": "interleaved_1f1b", "stages_per_device": each, **options}
    return pipelined(devices, strategy, **given)


def assert_same_logs(one: Any, other: Any) -> None:
    expected, actual = one.callback_metrics, other.callback_metrics
    assert set(expected) == set(actual)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-12, atol=1e-12, msg=name)


# Transparency


# Schedules with numbers of devices and of stages on each.
PLANS = [
    *((schedule, devices, 1) for schedule in ("gpipe", "1f1b") for devices in (2, 3, 4)),
    *((schedule, devices, each) for schedule in INTERLEAVED for devices in (2, 3) for each in (2, 3)),
    *(("interleaved_zero_bubble", devices, 1) for devices in (1, 2, 3)),
]


@pytest.mark.quick_cases(9)
@pytest.mark.parametrize(("plan", "micro_batches", "threads"), pairwise(PLANS, [1, 2, 4, 5, 13], [None, True]))
def test_gradients_are_those_of_one_device(plan, micro_batches, threads):
    """Tied weights, skips, containers between stages, masked tokens, batches of fewer samples than micro-batches."""
    schedule, devices, each = plan
    expected = reference(Tokens, val=[4, 3])
    options = {"micro_batches": micro_batches, "schedule": schedule, "threads": threads}
    run = fit(Tokens, SIZES, val=[4, 3], **looped(devices, each, **options))
    assert_same_run(expected, run)
    assert_same_logs(expected[2], run[2])
    timeline = run[2].connected_strategy.timeline
    last = min(micro_batches, SIZES[-1])
    for device in range(devices):
        own = [(span.stage, span.action) for span in timeline.spans if span.stage % devices == device]
        assert own == actions_of(schedule, device, devices, last, each)


def by_self() -> Any:
    return Tokens(by_self=True)


def test_the_module_itself_may_be_the_network():
    assert_same_run(reference(by_self), fit(by_self, SIZES, **pipelined(3, micro_batches=4)))


class LongRecurrent(Base):
    """An LSTM's output is a tuple within a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(FEATURES, 5, batch_first=True)
        self.second = nn.LSTM(5, 4, num_layers=2, batch_first=True)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, features: Any) -> Any:
        hidden, (last, cell) = self.first(features)
        more, _ = self.second(hidden)
        return self.head(more.mean(1)) + last[0, :, :CLASSES] * cell[0, :, :CLASSES]


class Transformer(Base):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(FEATURES, 2, 12, dropout=0.0, batch_first=True)
        self.net = nn.TransformerEncoder(layer, 4, norm=nn.LayerNorm(FEATURES), enable_nested_tensor=False)
        self.head = nn.Linear(FEATURES, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net(batch["features"], src_key_padding_mask=~batch["mask"])
        return nn.functional.cross_entropy(self.head(hidden.mean(1)), batch["label"])

    def configure_optimizers(self) -> Any:  # Adam would make something of the rounding in gradients that are 0
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Frozen(Base):
    """A whole stage is frozen, and a part that nothing before needs a gradient for."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), *[nn.Linear(30, 30) for _ in range(4)], nn.Linear(30, CLASSES))
        self.net[1].requires_grad_(False)
        self.net[3].requires_grad_(False)

    def forward(self, features: Any) -> Any:
        return self.net(features)


class Before(Base):
    """Something that is trained is computed before the network, and used once more beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 6)
        self.net = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 6))
        self.head = nn.Linear(6, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = torch.tanh(self.first(batch["features"].mean(1)))
        made = self.net(hidden)
        return nn.functional.cross_entropy(self.head(made + hidden), batch["label"]) + hidden.square().mean()


class SharedLayer(Base):
    """The same layer is called in several stages."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.head = nn.Linear(30, 30), nn.Linear(30, 30), nn.Linear(30, CLASSES)

    def forward(self, features: Any) -> Any:
        hidden = torch.tanh(self.one(features.flatten(1)))
        hidden = torch.tanh(self.other(hidden))
        hidden = torch.tanh(self.one(hidden)) + self.one.bias
        return self.head(torch.tanh(self.one(self.other(hidden))))


class InPlace(Base):
    """Layers that overwrite their input, also through a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(30, 9), nn.ReLU(inplace=True), nn.Linear(9, 9), nn.Identity(), nn.ELU(inplace=True)
        )
        self.head = nn.Linear(9, CLASSES)

    def forward(self, features: Any) -> Any:
        hidden = self.net(features)
        seen = self.net[1](features.flatten(1)).view(-1, 3, 3).flatten(1)
        seen.mul_(2)
        seen += 1
        return self.head(hidden + seen)


class Whole(Base):
    """A block that asks for values stays whole, and changes its input in place."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(30, 30)

        def forward(self, x: Any) -> Any:
            x += 1
            return 1.5 * torch.tanh(self.layer(x)) if float(x.detach().sum()) != 0 else x

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(30, 30), *[self.Block() for _ in range(3)])
        self.head = nn.Linear(30, CLASSES)

    def forward(self, features: Any) -> Any:
        return self.head(self.net(features))


class SizeAsArgument(Base):
    """Micro-batches of unequal sizes are calls of unequal structure."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(30, 9), nn.Tanh(), nn.Linear(9, CLASSES))

        def forward(self, features: Any, size: int) -> Any:
            return self.layers(features.reshape(size, 30))

    def __init__(self) -> None:
        super().__init__()
        self.net = self.Net()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.net(batch["features"], len(batch["features"])), batch["label"])


NETWORKS = [
    Mlp, Convolution, Recurrent, Tied, Masked, MaskedOnTheHost, LongRecurrent, Transformer, Frozen, Before, SharedLayer,
    InPlace, Whole, SizeAsArgument,
]  # fmt: skip


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("strategy", [PipelineStrategy, Copying])
@pytest.mark.parametrize("make", NETWORKS)
def test_networks_of_all_kinds(make, strategy):
    run = fit(make, SIZES, **pipelined(2, strategy, micro_batches=4))
    assert_same_run(reference(make), run)


DIVISIBLE = [Recurrent, Tied, Frozen, Before, SharedLayer, InPlace, Transformer]


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    ("make", "strategy", "schedule"), pairwise(DIVISIBLE, [PipelineStrategy, Copying], INTERLEAVED)
)
def test_several_stages_on_each_device(make, strategy, schedule):
    run = fit(make, SIZES, **looped(1 if make is Recurrent else 2, 2, strategy, micro_batches=4, schedule=schedule))
    assert_same_run(reference(make), run)


class Evaluated(Transformer):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        hidden = self.net(batch["features"], src_key_padding_mask=~batch["mask"])
        # Torch's shortcut leaves other values where there is padding.
        self.log("val_loss", (hidden * batch["mask"].unsqueeze(-1)).square().sum())


@pytest.mark.parametrize("options", [{}, {"strategy": Copying}, {"engine": "processes"}])
def test_a_cut_within_a_layer_that_is_one_call_in_an_evaluation(options):
    cut_before = ["net.layers.1.linear1"]
    plan = pipelined(2, micro_batches=2, cut_before=cut_before, **options)
    # Gradients of other processes cannot be read.
    run = fit(Evaluated, [13, 5], val=[7], callbacks=[], **plan)
    expected = fit(Evaluated, [13, 5], val=[7])
    assert run[2].connected_strategy.portable.strategy_state()["cut_before"] == cut_before
    for name, value in expected[0].state_dict().items():
        torch.testing.assert_close(run[0].state_dict()[name], value, rtol=1e-12, atol=1e-12, msg=name)
    assert_same_logs(expected[2], run[2])


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("make", [Tokens, SharedLayer, Tied])
@pytest.mark.parametrize("threads", [None, True])
def test_copies_of_tied_layers(make, threads):
    run = fit(make, SIZES, accumulate_grad_batches=2, **pipelined(3, Copying, micro_batches=3, threads=threads))
    assert_same_run(reference(make, accumulate_grad_batches=2), run)


@pytest.mark.parametrize("threads", [None, True])
def test_a_layer_has_one_copy_on_each_device(threads):
    """The shared layer is called in four stages, on two devices."""
    cut = {"cut_before": ["other", "tanh_2", "tanh_3"], "micro_batches": 3, "threads": threads}
    run = fit(SharedLayer, SIZES, accumulate_grad_batches=2, **looped(2, 2, Copying, **cut))
    assert_same_run(reference(SharedLayer, accumulate_grad_batches=2), run)


class Sparse(Base):
    """The gradients of its embedding are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.EmbeddingBag(VOCABULARY, 6, sparse=True), nn.Tanh(), nn.Linear(6, CLASSES))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.net(batch["tokens"]), batch["label"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("options", [{}, {"schedule": "interleaved_zero_bubble"}, {"engine": "processes"}])
def test_sparse_gradients(options):
    options = pipelined(2, micro_batches=2, stages_per_device=1, **options)
    expected, run = fit(Sparse, [13, 5], callbacks=[]), fit(Sparse, [13, 5], callbacks=[], **options)
    for name, value in expected[0].state_dict().items():
        torch.testing.assert_close(run[0].state_dict()[name], value, rtol=1e-12, atol=1e-12, msg=name)


class Noting(nn.Linear):
    """Notes the weights with which it computes, and is one call for the pipeline, since it asks for a value."""

    computed: set[int] = set()

    def forward(self, features):
        if not bool(features.isfinite().all()):
            raise ValueError("values that are not finite")
        self.computed.add(self.weight.data_ptr())
        return super().forward(features)


class CalledTwice(Mlp):
    """Its largest child is a layer that two stages call; the network is the module itself."""

    def __init__(self) -> None:
        super().__init__()
        del self.net
        self.one = Noting(FEATURES * TOKENS, FEATURES * TOKENS)
        self.other, self.head = nn.Linear(FEATURES * TOKENS, FEATURES * TOKENS), nn.Linear(30, CLASSES)

    def forward(self, features):
        hidden = torch.tanh(self.other(torch.tanh(self.one(features.flatten(1)))))
        return self.head(torch.tanh(self.one(hidden)))

    def on_train_epoch_start(self) -> None:
        Noting.computed.clear()  # in the first epoch also with weights that were lent to a device for a check


def test_a_later_stage_computes_the_largest_child_with_its_own_copy():
    expected = reference(CalledTwice)
    run = fit(CalledTwice, SIZES, **pipelined(2, Copying, micro_batches=2, cut_before=["other"]))
    assert_same_run(expected, run)
    assert len(Noting.computed) == 2


class WithLateLayer(nn.Linear):
    """Creates its activation function when it is first called."""

    def forward(self, features):
        if not hasattr(self, "activation"):
            self.activation = nn.Tanh()
        return self.activation(super().forward(features))


class Late(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.net[1] = WithLateLayer(TOKENS * FEATURES, 8)


@pytest.mark.parametrize("cut_before", [["net.4"], None])
def test_a_first_call_may_create_submodules(cut_before):
    run = fit(Late, SIZES, **pipelined(2, micro_batches=2, cut_before=cut_before))
    assert_same_run(reference(Late), run)


OPTIONS: dict[str, dict[str, Any]] = {
    "accumulated with a ragged end": {"accumulate_grad_batches": 2},
    "clipped": {"gradient_clip_val": 0.05},
    "accumulated and clipped by value": {
        "accumulate_grad_batches": 3,
        "gradient_clip_val": 0.01,
        "gradient_clip_algorithm": "value",
    },
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options, schedule):
    run = fit(Tokens, SIZES, **options, **pipelined(3, micro_batches=5, schedule=schedule))
    expected = reference(Tokens, **options)
    assert_same_run(expected, run)
    assert_same_logs(expected[2], run[2])


class Scheduled(Mlp):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "step"},
        }


class ByLbfgs(Mlp):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=3)


class Stateful(Mlp):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.1, initial_accumulator_value=0.1)


@pytest.mark.parametrize("make", [Scheduled, ByLbfgs, Stateful])
def test_optimizers_and_schedulers(make):
    assert_same_run(
        reference(make), fit(make, SIZES, **pipelined(2, micro_batches=3)), 1e-10 if make is ByLbfgs else 1e-12
    )


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


@pytest.mark.parametrize("stages", [2, 3])
def test_steps_that_skip(stages):
    """Micro-batches of one sample, most of which are skipped."""
    assert_same_run(reference(Skipping), fit(Skipping, SIZES, **pipelined(stages, micro_batches=13)))


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
        assert outputs["logits"].shape == (len(batch["label"]), CLASSES)
        self.seen.append(outputs["logits"])


def test_metrics_and_outputs():
    expected, run = reference(Measured), fit(Measured, SIZES, **pipelined(2, micro_batches=4))
    assert_same_run(expected, run)
    assert_same_logs(expected[2], run[2])
    for one, other in zip(expected[0].seen, run[0].seen, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12, check_device=False)


# Precision


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision(precision):
    options = {"precision": precision, "max_epochs": 1}
    expected = fit(Mlp, [8, 8], **options)
    run = fit(Mlp, [8, 8], **options, **pipelined(2, micro_batches=1))
    assert_same_run(expected, run, 1e-6)
    assert_same_run(expected, fit(Mlp, [8, 8], **options, **pipelined(2, micro_batches=4, threads=True)), 0.05)


# Evaluations


@pytest.mark.parametrize("options", [pipelined(2), pipelined(4), looped(2, 3)])
def test_evaluations_are_those_of_one_device_to_the_bit(options):
    loader = DataLoader(Batches([5, 3]), batch_size=None)
    module, _, trainer = fit(Tokens, SIZES, max_epochs=1)
    expected = [trainer.validate(module, loader, verbose=False), trainer.test(module, loader, verbose=False)]
    predicted = trainer.predict(module, loader)
    other = quiet(**options)
    assert [other.validate(module, loader, verbose=False), other.test(module, loader, verbose=False)] == expected
    for one, another in zip(predicted, other.predict(module, loader), strict=True):
        assert torch.equal(one, another)


def test_evaluated_first_and_trained_then():
    module = Tokens().double()
    trainer = quiet(**pipelined(2, micro_batches=4))
    loader = DataLoader(Batches([5, 3]), batch_size=None)
    trainer.validate(module, loader, verbose=False)
    trainer.fit(module, loader)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader)
    assert "forward" not in vars(module)
    assert "forward" not in vars(module.net)


def test_a_forward_on_the_instance_returns():
    module = Mlp().double()
    layers = list(module.net)

    def forward(features: Any) -> Any:
        for layer in layers:
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


@pytest.mark.parametrize("strategy", [PipelineStrategy, Copying])
def test_gradients_pass_through_a_forward_outside_of_the_step(strategy):
    expected, run = reference(Training), fit(Training, SIZES, **pipelined(3, strategy, micro_batches=2))
    assert_same_run(expected, run)
    for name, gradient in expected[0].found.items():
        torch.testing.assert_close(run[0].found[name], gradient, rtol=1e-11, atol=1e-12, check_device=False, msg=name)


# Random numbers


class Dropping(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), *[nn.Sequential(nn.Linear(30, 30), nn.Dropout(0.5)) for _ in range(4)])
        self.head = nn.Linear(30, CLASSES)

    def forward(self, features: Any) -> Any:
        return self.head(self.net(features))


def test_dropout_can_be_repeated():
    cut = {"cut_before": ["net.3"], "micro_batches": 4}
    runs = [fit(Dropping, SIZES, **pipelined(2, **cut)) for _ in range(2)]
    assert_same_run(*runs, 0.0)


def test_measuring_leaves_no_trace():
    """Neither in random numbers nor in buffers: the same cut, measured or given, comes to the same."""

    class Normed(Dropping):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(CLASSES)

        def forward(self, features: Any) -> Any:
            return self.norm(super().forward(features))

    measured = fit(Normed, [8, 12], **pipelined(2, micro_batches=4))
    names = measured[2].connected_strategy.portable.strategy_state()["cut_before"]
    given = fit(Normed, [8, 12], **pipelined(2, micro_batches=4, cut_before=names))
    assert_same_run(measured, given, 0.0)
    for one, other in zip(measured[0].buffers(), given[0].buffers(), strict=True):
        assert torch.equal(one, other)


assert (TOKENS, VOCABULARY) == (5, 11)


class Constants(Base):
    """Makes tensors in its forward that depend on nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(30, 9), nn.Linear(9, 9), nn.Linear(9, CLASSES)

    def forward(self, features: Any) -> Any:
        hidden = torch.tanh(self.one(features.flatten(1))) + torch.arange(9)
        return self.three(torch.tanh(self.two(hidden)) * torch.linspace(0, 1, 9).double())


class ConstantsBesideTheInput(Constants):
    """Makes them on the device of its input; a later stage has another device."""

    def forward(self, features: Any) -> Any:
        device = features.device
        hidden = torch.tanh(self.one(features.flatten(1))) + torch.arange(9, device=device)
        return self.three(torch.tanh(self.two(hidden)) * torch.linspace(0, 1, 9, device=device).double())


def test_tensors_that_the_forward_makes_by_itself():
    assert_same_run(reference(Constants), fit(Constants, SIZES, **pipelined(2)))


def test_tensors_that_the_forward_makes_on_the_device_of_its_input():
    assert_same_run(
        reference(ConstantsBesideTheInput),
        fit(ConstantsBesideTheInput, SIZES, **pipelined(2, micro_batches=2, cut_before=["two"])),
    )
