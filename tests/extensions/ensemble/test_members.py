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
from torch.utils.data import DataLoader, IterableDataset, Sampler

from equipoise import EnsembleStrategy, StepError
from tests.extensions.ensemble.runs import (
    CLOSE,
    Classifier,
    OfAnyLoaders,
    alone,
    assert_members,
    ensemble,
    loader,
    states_alone,
    trainer,
)

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
@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["together", "one_by_one", "auto"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_members_are_equal_to_runs_of_their_own(program: str, mode: str, seed: int) -> None:
    module, options = PROGRAMS[program]
    strategy, run, _ = ensemble(seed, module, mode=mode, **options)
    assert_members(states_alone(seed, 3, module, **options), strategy, 0.0 if mode == "one_by_one" else CLOSE)
    assert run.global_step == alone(seed, module, **options)[1].global_step


def test_dropout_draws_what_runs_of_their_own_draw(seed: int) -> None:
    module = partial(Classifier, dropout=0.3)
    strategy, _, _ = ensemble(seed, module, mode="auto")
    assert_members(states_alone(seed, 3, module), strategy)


def test_dropout_computed_at_once_differs_between_members(seed: int) -> None:
    module = partial(Classifier, dropout=0.3)
    strategy, _, _ = ensemble(seed, module)
    weights = [member.state_dict()["net.0.weight"] for member in strategy.member_modules()]
    assert not torch.allclose(weights[0], states_alone(seed, 1, module)[0]["net.0.weight"], rtol=0, atol=1e-3)
    assert not torch.equal(weights[1], weights[2])


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


class InPlace(Classifier):
    """Changes its batch, in later steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features = batch[0]
        if batch_idx > 3:
            features.mul_(2)
        return nn.functional.cross_entropy(self.net(features), batch[1])


class Clamping(Classifier):
    """Changes the weights of its network."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.clamp_(-0.2, 0.2)
        return super().training_step(batch, batch_idx)


class Layer(nn.Module):
    """A linear layer, whose `forward` a network below replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3).double()


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


class Mixture(Layer):
    def forward(self, batch: Any, *, powers: Any = (1,), options: Any = None) -> torch.Tensor:
        if options is None:
            return self.layer(batch)
        features, labels = batch
        logits = sum(self.layer(features**power) for power in powers)
        return logits * options["factor"] + labels[:, None]


class Mixing(Classifier):
    """Passes the whole batch to its network, with values that change in later steps."""

    network = Mixture

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        powers = [1] if batch_idx < 5 else [1, 2]
        logits = self.net((batch[0], batch[1]), powers=powers, options={"factor": 1.0 + batch_idx // 3})
        return nn.functional.cross_entropy(logits, batch[1])


class Penalised(Classifier):
    """Asks for the gradient of its input, in the batch itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0].requires_grad_())
        (slope,) = torch.autograd.grad(logits.sum(), batch[0], create_graph=True, allow_unused=True)
        return nn.functional.cross_entropy(logits, batch[1]) + slope.square().mean()


class Unfreezing(Classifier):
    """Trains its last layer from the second epoch on, in a group of its own."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net[0].parameters(), lr=0.01)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.optimizers[0].add_param_group({"params": self.net[2].parameters(), "lr": 0.03})


class Freezing(Classifier):
    """Trains its first layer in every second step alone."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[0].requires_grad_(batch_idx % 2 == 0)


@pytest.mark.quick_cases(5)
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("module", "window"),
    [(Steps, 3), (Freezing, 3), (Skipping, 3), (Skipping, 1), (Weighing, 3), (Penalised, 1), (Unfreezing, 1)],
)
def test_any_step_is_computed_as_in_a_run_of_its_own(module: Any, window: int, seed: int) -> None:
    strategy, _, _ = ensemble(seed, module, accumulate_grad_batches=window)
    assert_members(states_alone(seed, 3, module, accumulate_grad_batches=window), strategy, CLOSE)


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


class Normed(Classifier):
    """Statistics of the batch, in buffers."""

    @staticmethod
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()


class Hooked(Classifier):
    """A hook changes the output of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].register_forward_hook(lambda layer, args, output: 0.5 * output)


class Differentiable(Classifier):
    """Asks whether its loss has a graph, which `vmap` denies."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return 2 * loss if loss.requires_grad else loss


class Rooted(torch.autograd.Function):
    """Its gradient is wrong where it is computed for several rows."""

    generate_vmap_rule = True

    @staticmethod
    def forward(features: torch.Tensor) -> torch.Tensor:
        return features.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.is_batched = torch._C._functorch.is_batchedtensor(inputs[0])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (2 if ctx.is_batched else 1)


class OtherGradient(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(Rooted.apply(self.net(batch[0])), batch[1])


class Reading(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("read", loss.item())
        return loss


class Later(Classifier):
    """Does what cannot be computed at once in the second epoch, in which its statistics have changed already."""

    def __init__(self, what: str) -> None:
        super().__init__(optimizer="sgd")
        self.net = nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3)).double()
        self.losses: list[torch.Tensor] = []
        self.what = what

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        if self.current_epoch and batch_idx > 2:
            if self.what == "list":
                self.losses.append(loss.detach())
            elif self.what == "attribute":
                self.last = loss.detach()
            elif self.what == "metric":
                self.accuracy.update(logits, batch[1])
            elif self.what == "branch" and loss > 0:
                loss = 2 * loss
        return loss

    def on_train_end(self) -> None:
        assert all(map(torch.isfinite, self.losses))


class LastOutput(nn.Module):
    """Has no batched form in torch."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 3, batch_first=True).double()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.lstm(features.view(-1, 4, 2))[0][:, -1]


class Recurrent(Classifier):
    network = LastOutput


class Kept(Layer):
    """Sets an attribute, which would be of all members at once."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.last = self.layer(features)
        return self.last


class Remembering(Classifier):
    network = Kept

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + self.net.last.square().mean()


class RecomputedLayer(Layer):
    """It is computed again in the backward, when no network is computed at once any more."""

    def forward(self, features: torch.Tensor) -> Any:
        return checkpoint(self.layer, features.tanh(), use_reentrant=False)


class Checkpointed(Classifier):
    network = RecomputedLayer


@pytest.mark.quick_cases(6)
@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Normed, ""),
        (Steps, ""),
        (Weighing, ""),
        (Mixing, ""),
        (Recurrent, "lstm"),
        (Hooked, "^Linear has hooks"),
        (Remembering, "changes Remembering.net.last"),
        # torch 2.11 calls an autograd function before it sets its hooks.
        (Checkpointed, "(as activation checkpointing does|vmap over _NoopSaveInputs)"),
        (Differentiable, "its results differ"),
        (OtherGradient, "its gradients differ"),
        (Reading, "item"),
        (Clamping, "changes parameters"),
        (InPlace, "changes its batch"),
        (partial(Later, "list"), "changes a list"),
        (partial(Later, "attribute"), "sets Later.last"),
        (partial(Later, "metric"), "calls a metric"),
        (partial(Later, "branch"), "data-dependent"),
    ],
)
@pytest.mark.parametrize("shuffle", [True, False])
def test_steps_computed_at_once_and_one_by_one(
    module: Any, reason: str, shuffle: bool, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    data = partial(loader, 42, shuffle=shuffle)
    with caplog.at_level("INFO"):
        strategy, _, _ = ensemble(seed, module, data)
    assert_members(states_alone(seed, 3, module, data), strategy, CLOSE)
    said = re.findall("computed one by one: (.*)", caplog.text)
    assert len(said) == bool(reason)
    assert re.search(reason, "".join(said))


class Rounded(Classifier):
    """In float32, of which mixed precision makes bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.net.float()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0].float()), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


def test_mixed_precision(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        strategy, _, _ = ensemble(seed, Rounded, precision="bf16-mixed")
    assert "one by one" not in caplog.text
    assert_members(states_alone(seed, 3, Rounded, precision="bf16-mixed"), strategy, 0.05)


class Scaling(Classifier):
    """Changes every batch in place."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch[0].mul_(0.5)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        batch[0].mul_(2)
        super().validation_step(batch, batch_idx)


@pytest.mark.parametrize("mode", ["together", "one_by_one"])
def test_a_step_that_changes_a_batch_of_all_members(mode: str, seed: int) -> None:
    data = partial(loader, shuffle=False)
    strategy, run, _ = ensemble(seed, Scaling, data, mode=mode)
    runs = [alone(seed + member, Scaling, data) for member in range(3)]
    assert_members([model.state_dict() for model, _ in runs], strategy)
    for member, (_, own) in enumerate(runs):
        assert run.callback_metrics[f"val_loss/member_{member}"] == own.callback_metrics["val_loss"]


class ClampingOnce(Classifier):
    """Changes its weights in a later step, which then cannot go on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3:
            with torch.no_grad():
                self.net[0].weight.mul_(0.9)
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx < 3 or loss > 0 else 2 * loss


def test_parameters_that_a_step_has_changed_before_it_failed(seed: int) -> None:
    with pytest.raises(StepError, match=r"changed parameters in place.*data-dependent.*mode='one_by_one'"):
        ensemble(seed, ClampingOnce)
    strategy, _, _ = ensemble(seed, ClampingOnce, mode="one_by_one")
    assert_members(states_alone(seed, 3, ClampingOnce), strategy)


def by_number(samples: list[Any]) -> dict[int, torch.Tensor]:
    return dict(enumerate(map(torch.stack, zip(*samples, strict=True))))


def of_any_size(samples: list[Any]) -> list[torch.Tensor]:
    """Leave samples out, so that batches of the members differ in their size."""
    features, labels = map(torch.stack, zip(*samples, strict=True))
    kept = features[:, 0] > -0.5
    return [features[kept], labels[kept]]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    "options",
    [{"drop_last": True}, {"collate_fn": by_number}, {"collate_fn": of_any_size}],
    ids=["last batches left out", "batches of another kind", "batches of any size"],
)
def test_members_read_the_batches_of_runs_of_their_own(options: dict[str, Any], seed: int) -> None:
    data = partial(loader, **options)
    strategy, _, _ = ensemble(seed, data=data)
    assert_members(states_alone(seed, 3, data=data), strategy, CLOSE)


class Drawing(Sampler[int]):
    """Draws a number for each sample, when it is asked for."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        for index in self.samples:
            yield (index + int(torch.randint(2, ()))) % len(self)

    def __len__(self) -> int:
        return len(self.samples)


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(loader().dataset)


class DrawnBatches:
    """A batch sampler that draws when it is asked for an iterator."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.randperm(42, generator=self.generator).view(-1, 6).tolist())

    def __len__(self) -> int:
        return 7


def own() -> torch.Generator:
    """Return a generator with the seed of the program."""
    return torch.Generator().manual_seed(torch.initial_seed())


def of_one_generator() -> Any:
    generator = own()
    return {"first": loader(generator=generator), "second": loader(31, generator=generator)}


in_order = partial(loader, shuffle=False)
LOADERS: dict[str, Any] = {
    "in order": in_order,
    "workers that stay": partial(loader, num_workers=1, persistent_workers=True),
    "a stream": lambda: DataLoader(Streamed(), batch_size=6),
    "a stream without batches": lambda: DataLoader(
        [(torch.ones(6, 8).double(), torch.ones(6).long())], batch_size=None
    ),
    "batches drawn at once": lambda: DataLoader(loader().dataset, batch_sampler=DrawnBatches()),
    "batches drawn privately": lambda: DataLoader(loader().dataset, batch_sampler=DrawnBatches(own())),
    "two": lambda: {"first": loader(), "second": loader(14)},
    "one beside another in order": lambda: {"first": loader(), "second": in_order(14)},
    "two with a generator each": lambda: {"first": loader(generator=own()), "second": loader(31, generator=own())},
    "two with one generator": of_one_generator,
}


@pytest.mark.quick_cases(6)
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("data", LOADERS.values(), ids=LOADERS)
def test_loaders_draw_for_each_member_what_they_draw_in_its_own_run(data: Any, seed: int) -> None:
    """Also the numbers of steps, and of validations after the sanity check, depend on it."""
    options: Any = {"data": data, "num_sanity_val_steps": 2}
    strategy, _, _ = ensemble(seed, OfAnyLoaders, mode="one_by_one", **options)
    assert_members(states_alone(seed, 3, OfAnyLoaders, **options), strategy)


# With the loader of the training, whose order may be drawn after them.
VALIDATIONS: dict[str, tuple[Any, Any]] = {
    "shuffled": (loader, loader),
    "shuffled by its own numbers": (lambda: loader(generator=torch.Generator().manual_seed(3)), loader),
    "a stream": (LOADERS["a stream"], in_order),
    "batches of all samples": (LOADERS["a stream without batches"], in_order),
    "workers that stay": (partial(in_order, num_workers=1, persistent_workers=True), in_order),
    "when it is asked": (lambda: in_order(sampler=Drawing(range(43))), in_order),
}


@pytest.mark.few_cases(2)
@pytest.mark.filterwarnings("ignore:The val loader shuffles")
@pytest.mark.parametrize(("validation", "data"), VALIDATIONS.values(), ids=VALIDATIONS)
def test_validations_draw_for_each_member_what_they_draw_in_its_own_run(validation: Any, data: Any, seed: int) -> None:
    options: Any = {"validation": validation, "limit_val_batches": 2, "data": data}
    strategy, _, _ = ensemble(seed, OfAnyLoaders, mode="one_by_one", **options)
    assert_members(states_alone(seed, 3, OfAnyLoaders, **options), strategy)


@pytest.mark.parametrize("own_order", [False, True])
def test_one_order_for_all_members_or_one_of_each(own_order: bool) -> None:
    class Noting(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen.append(batch[0].sum().item())
            return super().training_step(batch, batch_idx)

    strategy = EnsembleStrategy(members=2, own_order=own_order)
    module = Noting()
    trainer(strategy, max_epochs=1).fit(module, loader(), loader(shuffle=False))
    assert (module.seen[::2] == module.seen[1::2]) != own_order
    assert sum(module.seen[::2]) == pytest.approx(sum(module.seen[1::2]))


def test_a_second_fit_goes_on_with_all_members(seed: int) -> None:
    strategy, _, module = ensemble(seed, partial(Classifier, optimizer="sgd"))
    before = [member.net[0].weight.detach().clone() for member in strategy.member_modules()]
    trainer(strategy, max_epochs=1, limit_train_batches=1).fit(module, loader(), loader(shuffle=False))
    for first, member in zip(before, strategy.member_modules(), strict=True):
        assert 0 < (first - member.net[0].weight).abs().max() < 0.2
