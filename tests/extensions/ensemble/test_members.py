"""Each member of an ensemble is the model of a run of its own."""

import random
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, RandomSampler, Sampler

from equipoise import EnsembleStrategy, StepError
from tests.conftest import ignoring
from tests.extensions.ensemble.runs import Classifier, alone, difference, ensemble, loader, states_alone, trainer

pytestmark = ignoring()

# What is said of the numbers of members that are computed at once. One by one they are the same to the bit.
CLOSE = 1e-10

PROGRAMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adam": (Classifier, {}),
    "sgd with momentum, clipped": (partial(Classifier, optimizer="sgd"), {"gradient_clip_val": 0.1}),
    "clipped by value": (
        partial(Classifier, optimizer="sgd"),
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
    "accumulated": (Classifier, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}),
    "not elementwise": (partial(Classifier, optimizer="adafactor"), {}),
}


@pytest.fixture
def seed() -> int:
    drawn = random.randrange(10**6)
    print("seed", drawn)
    return drawn


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("mode", ["together", "one_by_one", "auto"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_members_are_equal_to_runs_of_their_own(program: str, mode: str, seed: int) -> None:
    module, options = PROGRAMS[program]
    strategy, run, _ = ensemble(seed, module, mode=mode, **options)
    largest = difference(strategy, states_alone(seed, 3, module, **options))
    assert largest <= (0.0 if mode == "one_by_one" else CLOSE)
    assert run.global_step == alone(seed, module, **options)[1].global_step


def test_dropout_draws_what_runs_of_their_own_draw(seed: int) -> None:
    module = partial(Classifier, dropout=0.3)
    strategy, _, _ = ensemble(seed, module, mode="auto")
    assert difference(strategy, states_alone(seed, 3, module)) == 0.0


def test_dropout_computed_at_once_differs_between_members(seed: int) -> None:
    strategy, _, _ = ensemble(seed, partial(Classifier, dropout=0.3))
    assert difference(strategy, states_alone(seed, 3, partial(Classifier, dropout=0.3))) > 1e-3
    states = [member.state_dict()["net.0.weight"] for member in strategy.member_modules()]
    assert not torch.equal(states[1], states[2])


class Steps(Classifier):
    """Transforms its batch, and uses parameters beside the network's call."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8, dtype=torch.float64))
        self.head = nn.Linear(3, 3).double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features = batch[0] * self.scale
        logits = self.head(self.net(features)) + self.net(features[:, :]).tanh()
        return nn.functional.cross_entropy(logits, batch[1]) + 0.01 * self.net[0].weight.square().sum()


class Branching(Classifier):
    """Its step branches on values, which differ between members."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        if logits.mean() > 0:
            logits = self.net(batch[0] * 2)
        return nn.functional.cross_entropy(logits, batch[1])


class InPlace(Classifier):
    """Changes its batch before the call, which shows that nothing was computed before."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features = batch[0]
        if batch_idx > 3:
            features.mul_(2)
        return nn.functional.cross_entropy(self.net(features), batch[1])


class Clamping(Classifier):
    """Changes the weights of its network before the call, which must not use those of before."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.clamp_(-0.2, 0.2)
        return super().training_step(batch, batch_idx)


class Scheduled(Classifier):
    """Sets an attribute of the network in later steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Scaled()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net.factor = 1.0 if batch_idx < 5 else 1.0 + batch_idx / 10
        return super().training_step(batch, batch_idx)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3).double()
        self.factor = 1.0

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.layer(features) * self.factor


class Skipping(Classifier):
    """Leaves out batches, which are others for each member."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch[0].mean() > 0:
            return None
        return super().training_step(batch, batch_idx)


class Weighing(Classifier):
    """Says how much a batch weighs, which differs between members."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        kept = batch[0][:, 0] > 0
        losses = nn.functional.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        count = kept.sum()
        return {"loss": (losses * kept).sum() / count.clamp(min=1), "loss_weight": count}


class Mixing(Classifier):
    """Passes the whole batch to its network, with values that change in later steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Mixture()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        powers = [1] if batch_idx < 5 else [1, 2]
        logits = self.net((batch[0], batch[1]), powers=powers, options={"factor": 1.0 + batch_idx // 3})
        return nn.functional.cross_entropy(logits, batch[1])


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3).double()

    def forward(self, batch: Any, *, powers: Any = (1,), options: Any = None) -> torch.Tensor:
        if options is None:
            return self.layer(batch)
        features, labels = batch
        logits = sum(self.layer(features**power) for power in powers)
        return logits * options["factor"] + labels[:, None]


class Penalised(Classifier):
    """Asks for the gradient of its input, in the batch itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0].requires_grad_())
        (slope,) = torch.autograd.grad(logits.sum(), batch[0], create_graph=True, allow_unused=True)
        return nn.functional.cross_entropy(logits, batch[1]) + slope.square().mean()


class PenalisedAtTimes(Classifier):
    """Asks for the gradient of its input in batches of a negative mean."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch[0].mean() < 0:
            batch[0].requires_grad_()
        logits = self.net(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        if batch[0].requires_grad:
            (slope,) = torch.autograd.grad(logits.sum(), batch[0], create_graph=True, allow_unused=True)
            loss = loss + slope.square().mean()
        return loss


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    "module",
    [*(Steps, Branching, InPlace, Clamping, Scheduled, Skipping), *(Weighing, Mixing, Penalised, PenalisedAtTimes)],
)
@pytest.mark.parametrize("window", [1, 3])
def test_any_step_is_computed_as_in_a_run_of_its_own(module: Any, window: int, seed: int) -> None:
    strategy, _, _ = ensemble(seed, module, accumulate_grad_batches=window)
    assert difference(strategy, states_alone(seed, 3, module, accumulate_grad_batches=window)) <= CLOSE


class Weighted(Classifier):
    """Weighs its losses by gradients of its parameters."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        slopes = torch.autograd.grad(loss, list(self.net.parameters()), retain_graph=True, allow_unused=True)
        return loss * (1 + sum(slope.norm() for slope in slopes if slope is not None)).detach()


def test_gradients_of_parameters_are_refused_where_these_are_stacked(seed: int) -> None:
    with pytest.raises(StepError, match=r"gradients of parameters in a step of an ensemble.*mode='one_by_one'"):
        ensemble(seed, Weighted)
    strategy, _, _ = ensemble(seed, Weighted, mode="one_by_one")
    assert difference(strategy, states_alone(seed, 3, Weighted)) == 0


class SharedNorm(Classifier):
    """Two networks with statistics in common, in an order that differs between members."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        norm = nn.BatchNorm1d(3)
        self.net = nn.Sequential(nn.Linear(8, 3), norm).double()
        self.other = nn.Sequential(nn.Linear(8, 3), norm).double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = 0.0
        if batch[0].mean() > 0:
            loss = self.other(batch[0] * 2).square().mean()
        return loss + nn.functional.cross_entropy(self.net(batch[0]), batch[1])


def test_networks_with_common_buffers(seed: int) -> None:
    data = partial(loader, 42)
    strategy, _, _ = ensemble(seed, SharedNorm, data)
    assert difference(strategy, states_alone(seed, 3, SharedNorm, data)) <= CLOSE


class NormedByBranch(Classifier):
    """Calls its network with the batch, or with what follows from it, as the weights of the member are."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.net = nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3)).double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features = batch[0] if self.net[0].weight.sum() > 0 else batch[0] * 2
        return nn.functional.cross_entropy(self.net(features), batch[1])


def test_the_member_that_ends_calls_together_keeps_its_statistics() -> None:
    # The first member's sum is positive, and several others' are not.
    data = partial(loader, 42)
    strategy, _, _ = ensemble(0, NormedByBranch, data, members=5)
    assert difference(strategy, states_alone(0, 5, NormedByBranch, data)) <= CLOSE


class Unfreezing(Classifier):
    """Trains its last layer from the second epoch on, in a group of its own."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net[0].parameters(), lr=0.01)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.optimizers[0].add_param_group({"params": self.net[2].parameters(), "lr": 0.03})


def test_parameters_that_the_optimizer_gets_in_a_run(seed: int) -> None:
    strategy, _, _ = ensemble(seed, Unfreezing)
    assert difference(strategy, states_alone(seed, 3, Unfreezing)) <= CLOSE


class Freezing(Classifier):
    """Trains its first layer in every second step alone."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[0].requires_grad_(batch_idx % 2 == 0)


def test_parameters_that_are_frozen_in_some_steps(seed: int) -> None:
    strategy, _, _ = ensemble(seed, Freezing)
    assert difference(strategy, states_alone(seed, 3, Freezing)) <= CLOSE


class Watching(Classifier):
    """Notes what hooks see."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.gradients: list[torch.Tensor] = []

    def on_after_backward(self) -> None:
        self.gradients.append(self.net[0].weight.grad.clone())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())
        assert torch.equal(self.net[0].weight.grad, self.gradients[-1])


@pytest.mark.parametrize("mode", ["together", "one_by_one"])
def test_hooks_see_the_mean_loss_and_the_first_members_gradients(mode: Any, seed: int) -> None:
    _, _, module = ensemble(seed, Watching, mode=mode)
    runs = [alone(seed + member, Watching)[0] for member in range(3)]
    means = [sum(losses) / 3 for losses in zip(*(run.losses for run in runs), strict=True)]
    assert module.losses == pytest.approx(means, rel=1e-9)
    for found, expected in zip(module.gradients, runs[0].gradients, strict=True):
        assert torch.allclose(found, expected, rtol=0, atol=CLOSE)


class Linear(Classifier):
    """One layer, and batches with a dimension more."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 3).double()
        self.wide = nn.Sequential(nn.Linear(2, 3), nn.GELU(), nn.Linear(3, 1, bias=False)).double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scales = self.wide(batch[0].view(-1, 4, 2)).mean((1, 2))
        logits = self.net(batch[0]) * (1 + scales[:, None])
        return nn.functional.cross_entropy(logits, batch[1])


@pytest.mark.parametrize("own_order", [True, False])
def test_linear_layers(own_order: bool, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    data = partial(loader, shuffle=own_order)
    with caplog.at_level("INFO"):
        strategy, _, _ = ensemble(seed, Linear, data)
    # The module, too, whose forward calls a layer that is a network by itself.
    assert "member by member" not in caplog.text
    assert difference(strategy, states_alone(seed, 3, Linear, data)) <= CLOSE


class Normed(Classifier):
    """Statistics of the batch, in buffers."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.net = nn.Sequential(nn.Linear(8, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()


class Recurrent(Classifier):
    """Has no batched form in torch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = LastOutput()


class LastOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 3, batch_first=True).double()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.lstm(features.view(-1, 4, 2))[0][:, -1]


class Remembering(Classifier):
    """Its network sets an attribute, which would be of all members at once."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Kept()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        return nn.functional.cross_entropy(logits, batch[1]) + self.net.last.square().mean()


class Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3).double()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.last = self.layer(features)
        return self.last


class Checkpointed(Classifier):
    """Its network is computed again in the backward, when no network is computed at once any more."""

    def __init__(self) -> None:
        super().__init__()
        self.net = RecomputedLayer()


class RecomputedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3).double()

    def forward(self, features: torch.Tensor) -> Any:
        return checkpoint(self.layer, features.tanh(), use_reentrant=False)


class ValueBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3).double()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        outputs = self.layer(features)
        return outputs if outputs.sum() > 0 else outputs.square()


class BranchingNetwork(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net = ValueBranch()


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Normed, ""),
        (Recurrent, "net is computed member by member"),
        (Remembering, "its forward sets Kept.last"),
        (BranchingNetwork, "data-dependent"),
        # torch 2.11 calls an autograd function before it sets its hooks.
        (Checkpointed, "(as activation checkpointing does|vmap over _NoopSaveInputs)"),
    ],
)
def test_networks_that_cannot_be_computed_at_once(
    module: Any, reason: str, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        strategy, _, _ = ensemble(seed, module, partial(loader, 42))
    assert difference(strategy, states_alone(seed, 3, module, partial(loader, 42))) <= CLOSE
    assert re.search(reason, caplog.text) if reason else ("member by member" not in caplog.text)


def test_orders_are_those_of_runs_of_their_own_with_a_private_generator() -> None:
    def data(seed: int = 11) -> Any:
        return loader(generator=torch.Generator().manual_seed(seed))

    strategy, _, _ = ensemble(11, data=data)
    # The private generators of all members but the first have their seeds.
    expected = [alone(11 + member, data=partial(data, 11 + member))[0].state_dict() for member in range(3)]
    assert difference(strategy, expected) <= CLOSE


@pytest.mark.parametrize("options", [{"drop_last": True}, {"num_workers": 1}], ids=str)
def test_loaders(options: dict[str, Any], seed: int) -> None:
    data = partial(loader, **options)
    strategy, _, _ = ensemble(seed, data=data)
    assert difference(strategy, states_alone(seed, 3, data=data)) <= CLOSE


def sampled(sampler: Any) -> DataLoader[Any]:
    """Samples in the order of a sampler, which may shuffle."""
    return loader(shuffle=False, sampler=sampler(range(43)))


class Drawing(Sampler[int]):
    """Draws a number for each sample, when it is asked for."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        for index in self.samples:
            yield (index + int(torch.randint(2, ()))) % len(self)

    def __len__(self) -> int:
        return len(self.samples)


def private(samples: Any) -> Any:
    return RandomSampler(samples, generator=torch.Generator().manual_seed(3))


SAMPLERS = {
    "shuffled": RandomSampler,
    "with replacement": partial(RandomSampler, replacement=True),
    "when it is asked": Drawing,
    "from its own numbers": private,
}


@pytest.mark.filterwarnings("ignore:The val loader shuffles")
@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_a_validation_that_shuffles(sampler: Any, seed: int) -> None:
    """It draws numbers, before the order of the next epoch, and those of dropout, are drawn."""
    module = partial(Classifier, dropout=0.3)
    options: Any = {"validation": partial(sampled, sampler)}
    strategy, _, _ = ensemble(seed, module, mode="one_by_one", **options)
    assert difference(strategy, states_alone(seed, 3, module, **options)) <= CLOSE


def test_one_order_for_all_members(seed: int) -> None:
    class Noting(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen.append(batch[0].sum().item())
            return super().training_step(batch, batch_idx)

    torch.manual_seed(seed)
    module = Noting()
    trainer(EnsembleStrategy(members=2, own_order=False), max_epochs=1).fit(module, loader(), loader(shuffle=False))
    assert module.seen[::2] == module.seen[1::2]
    module.seen.clear()
    trainer(EnsembleStrategy(members=2), max_epochs=1).fit(module, loader(), loader(shuffle=False))
    assert module.seen[::2] != module.seen[1::2]
    assert sum(module.seen[::2]) == pytest.approx(sum(module.seen[1::2]))


def test_a_second_fit_goes_on_with_all_members(seed: int) -> None:
    strategy, _, module = ensemble(seed, partial(Classifier, optimizer="sgd"))
    before = [member.state_dict() for member in strategy.member_modules()]
    assert difference(strategy, before) == 0.0
    run = trainer(strategy, max_epochs=1, limit_train_batches=1)
    run.fit(module, loader(), loader(shuffle=False))
    after = [member.state_dict() for member in strategy.member_modules()]
    for first, second in zip(before, after, strict=True):
        step = (first["net.0.weight"] - second["net.0.weight"]).abs().max()
        assert 0 < step < 0.2
