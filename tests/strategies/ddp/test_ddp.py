"""DDP trains as one device does on the whole batch: any network, options, data and changes in the midst of a run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler, default_collate

from equipoise import ConfigurationError, DDPStrategy, StepError
from equipoise.interop.torch.modules import has_gradient_hooks
from equipoise.strategies.ddp.exchange import torch_engine
from equipoise.strategies.distributed import window_totals
from tests.strategies.runs import assert_trains_alike, fit, numbers_in, trainer
from tests.support.equality import assert_equal
from tests.support.networks.numbered import Numbered, Samples, numbered
from tests.support.networks.transparency import Base, Masked, MaskedOnTheHost, Mlp, Recurrent, Tied
from tests.support.one_device import OPTIONS, assert_same_run, on_one_device, train

pytestmark = pytest.mark.filterwarnings("ignore:No (positive|negative) samples")

# Networks and options


@pytest.mark.quick_cases(4)
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("engine", ["torch", "native"])
@pytest.mark.parametrize("make", [Mlp, Recurrent, Tied, Masked, MaskedOnTheHost], ids=lambda make: make.__name__)
def test_gradients_are_those_of_one_device(make: type[Base], engine: Any) -> None:
    """A step of two processes is a window of two batches; the last has a batch for one of them alone."""
    assert_same_run(on_one_device(make, accumulate_grad_batches=2), train(make, DDPStrategy(engine=engine), 2))


@pytest.mark.quick_cases(3)
@pytest.mark.thorough
@pytest.mark.parametrize("engine", ["torch", "native"])
@pytest.mark.parametrize("options", ["accumulated", "clipped", "accumulated and clipped by value"])
def test_accumulation_and_clipping_are_those_of_one_device(options: str, engine: Any) -> None:
    given = OPTIONS[options]
    more = {**given, "accumulate_grad_batches": 3 * given.get("accumulate_grad_batches", 1)}
    assert_same_run(on_one_device(Masked, **more), train(Masked, DDPStrategy(engine=engine), 3, **given))


# Modules that do more than a forward and a backward


class TwoBackwards(Numbered):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss / 2).backward(retain_graph=True)
        (loss / 2).backward()


class ThawsInTheEpoch(Numbered):
    def on_train_start(self) -> None:
        self.net[0].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 1:
            self.net[0].requires_grad_(True)


class GradientHook(Numbered):
    """Keeps half of a weight as it is, by a hook on its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight.register_hook(lambda gradient: gradient * torch.tensor([0.0, 1.0, 0.0, 1.0]))


class WithoutAGradientInSomeSteps(Numbered):
    def on_after_backward(self) -> None:
        if self.global_step % 2:
            self.net[0].weight.grad = None


class LineSearch(Numbered):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=2, line_search_fn="strong_wolfe")


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("engine", ["torch", "native"])
def test_lbfgs_receives_the_mean_loss_of_all_processes(engine: Any) -> None:
    assert_trains_alike(LineSearch, strategy=DDPStrategy(engine=engine))


class Grows(Numbered):
    """Adds a layer in the middle of an epoch, and replaces a weight."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 1:
            torch.manual_seed(5 + self.global_rank)
            self.net.append(nn.Linear(3, 3, dtype=self.dtype))
            self.net[0].weight = nn.Parameter(torch.randn(5, 4, dtype=self.dtype))
            new = [self.net[0].weight, *self.net[-1].parameters()]
            self.optimizers(use_pl_optimizer=False).add_param_group({"params": new})


class SkipsAStep(Numbered):
    """No process has a loss in the second step; weights without a gradient would decay."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.5)


KINDS = [
    *(WithoutAGradientInSomeSteps, Grows, TwoBackwards, ThawsInTheEpoch),
    *(GradientHook, SkipsAStep),
]


@pytest.mark.quick_cases(6)
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("engine", ["torch", "native"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_module_trains_as_on_one_device(kind: type[Numbered], engine: Any) -> None:
    module = assert_trains_alike(kind, strategy=DDPStrategy(engine=engine))
    if kind is GradientHook:
        assert torch.equal(module.net[0].weight[:, 0], numbered(kind).net[0].weight[:, 0].double())


class LeavesNoHook(DDPStrategy):
    def teardown(self, error: BaseException | None = None) -> None:
        parameters = list(self._module.parameters()) if self._module else []
        super().teardown(error)
        assert not any(map(has_gradient_hooks, parameters))


def test_hooks_of_the_exchange_end_with_the_run() -> None:
    fit(Numbered(), LeavesNoHook(engine="native"), count=8)


class SomeSamples(Numbered):
    """The loss of some samples, whose number is its weight: none in the first batch of the second process."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = nn.functional.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        keep = (batch[2] != 1) & (batch[2] != 3)
        return {"loss": (losses * keep).sum() / keep.sum().clamp(min=1), "loss_weight": int(keep.sum())}


class SkipsAStepInOneProcess(SomeSamples):
    """Returns None for that batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        return output if output["loss_weight"] else None


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [SomeSamples, SkipsAStepInOneProcess])
def test_a_batch_of_one_process_without_any_weight_or_loss_counts_for_nothing(kind: type[Numbered]) -> None:
    assert_trains_alike(kind, count=10)


class OnADevice(SkipsAStep):
    """Computes as on a device that the host must not wait for; where `skipped`, all processes skip a step.

    Args:
        skipped: The batches in which the step returns nothing.
        masked: The batches from which on the weight is a tensor, as a number of tokens is.
    """

    def __init__(self, skipped: tuple[int, ...], masked: int) -> None:
        super().__init__()
        self.skipped, self.masked = skipped, masked

    def setup(self, stage: str) -> None:
        if self.trainer.world_size > 1:
            torch_engine.reading_waits = window_totals.reading_waits = lambda device: True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx in self.skipped:
            return None
        losses = nn.functional.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        if batch_idx < self.masked:
            return losses.mean()
        keep = batch[2] % 3 > 0
        return {"loss": (losses * keep).sum() / keep.sum().clamp(min=1), "loss_weight": keep.sum()}


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("skipped", "masked"), [((2, 3), 9), ((1, 4), 2)])
def test_a_total_weight_that_the_host_can_know_without_the_device(skipped: tuple[int, ...], masked: int) -> None:
    assert_trains_alike(OnADevice, skipped, masked, count=22)


class ConstantLoss(Numbered):
    """Its loss is a constant for one sample."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return torch.zeros_like(loss, requires_grad=True) if 5 in batch[2] else loss


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("options", "window"),
    [({}, 1), ({}, 2), ({"engine": "native"}, 2), ({"find_unused_parameters": True}, 1)],
)
def test_a_constant_loss_of_one_process_has_zero_gradients(options: dict[str, Any], window: int) -> None:
    one, many = numbered(ConstantLoss), numbered(ConstantLoss)
    trainer("single_device", 1, accumulate_grad_batches=2 * window).fit(one, DataLoader(Samples(8), batch_size=1))
    strategy = DDPStrategy(timeout=60.0, **options)
    trainer(strategy, accumulate_grad_batches=window).fit(many, DataLoader(Samples(8), batch_size=1))
    assert_equal(one, many, 1e-12)


class ByHand(Numbered):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


@pytest.mark.thorough
def test_manual_optimisation_needs_a_batch_in_every_process() -> None:
    assert_trains_alike(ByHand, count=8)
    with pytest.raises(ConfigurationError, match=r"have 3 and 2 batches.*optimises by hand.*limit_train_batches=2"):
        fit(ByHand(), count=9)
    fit(ByHand(), count=9, max_steps=2)  # over before
    with pytest.raises(StepError, match=r"optimises by hand.*drop_last=True"):
        fit(ByHand(), count=9, max_steps=3)


# What an engine cannot do


class SparseEmbedding(Numbered):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Embedding(7, 3, sparse=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net((batch[0][:, 0] > 0).long()).square().mean()


class Unused(Numbered):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)


class GrowsInTheStep(Numbered):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 1:
            self.net.append(layer := nn.Linear(3, 3, dtype=self.dtype))
            self.optimizers(use_pl_optimizer=False).add_param_group({"params": list(layer.parameters())})
        return super().training_step(batch, batch_idx)


class StepsInTheBackward(Numbered):
    """Steps an optimiser for each weight as soon as its gradient is there."""

    def configure_optimizers(self) -> Any:
        optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in self.net[0].parameters()}
        for parameter in optimizers:
            parameter.register_post_accumulate_grad_hook(lambda parameter: optimizers[parameter].step())
        return torch.optim.SGD(self.net[2].parameters(), lr=0.1)


@pytest.mark.quick_cases(5)
@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("kind", "options", "accumulate", "message"),
    [
        (SparseEmbedding, {"engine": "native"}, 1, "exchanges dense gradients only"),
        (Numbered, {"static_graph": True}, 2, "does not go with accumulate_grad_batches"),
        (Unused, {}, 1, r"spare\.weight, spare\.bias.*find_unused_parameters=True"),
        (GrowsInTheStep, {}, 1, "gives the module a parameter that it trains"),
        (StepsInTheBackward, {"engine": "native"}, 1, "is stepped within a backward"),
    ],
)
def test_gradients_that_are_not_exchanged_are_refused(
    kind: type[Numbered], options: dict[str, Any], accumulate: int, message: str
) -> None:
    with pytest.raises(StepError, match=message):
        fit(kind(), DDPStrategy(**options), accumulate_grad_batches=accumulate)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"engine": "native"}])
def test_unused_parameters_are_left_as_they_are(options: dict[str, Any]) -> None:
    fit(Unused(), DDPStrategy(**options), count=7)


# Data


@pytest.mark.quick_cases(3)
@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("count", "processes", "shares"), [(13, 2, None), (13, 3, [3, 1, 2]), (4, 3, [3, 1, 2]), (2, 3, None)]
)
def test_each_sample_is_used_once_where_a_data_set_does_not_divide_evenly(
    count: int, processes: int, shares: Any
) -> None:
    module = numbered()
    run = trainer(DDPStrategy(shares=shares), processes)
    run.fit(module, DataLoader(Samples(count), batch_size=2, shuffle=True))
    assert [numbers_in(epoch) for epoch in module.seen] == [list(range(count))] * 2
    if count > 4:
        assert module.seen[0] != module.seen[1]  # shuffled anew
    assert module.same
    assert run.global_step == 2 * -(-count // (2 * processes))


def test_uneven_shares_train_as_one_device() -> None:
    one, many = numbered(), numbered()
    trainer("single_device", 1).fit(one, DataLoader(Samples(13), batch_size=6))
    trainer(DDPStrategy(shares=[0.5, 1.5])).fit(many, DataLoader(Samples(13), batch_size=3))
    assert [len(batch) for batch in many.seen[0][1]] == [4, 4, 1]
    assert_equal(one, many, 1e-12)


def test_a_sampler_of_the_users_own_is_divided() -> None:
    module, sampler = numbered(), WeightedRandomSampler([1.0] * 10, 10, replacement=False)
    trainer(max_epochs=1).fit(module, DataLoader(Samples(10), batch_size=2, sampler=sampler))
    assert numbers_in(module.seen[0]) == list(range(10))


class Stream(IterableDataset[Any]):
    """Samples without a length."""

    def __init__(self, indices: range) -> None:
        self.indices = indices

    def __iter__(self) -> Any:
        return (Samples(13)[index] for index in self.indices)


class Sharing(Stream):
    """Shares its samples out, unevenly."""

    def shard(self, num_shards: int, index: int) -> Stream:
        return Stream(self.indices[:9] if index == 0 else self.indices[9:])


@pytest.mark.thorough
def test_a_stream_that_shares_itself_out() -> None:
    module, run = numbered(), trainer(DDPStrategy(engine="native"))
    stream = DataLoader(Sharing(range(13)), batch_size=2)
    run.fit(module, stream, stream)
    for epoch in module.seen:
        assert epoch == [[[0, 1], [2, 3], [4, 5], [6, 7], [8]], [[9, 10], [11, 12]]]
    assert module.same
    assert run.global_step == 10
    expected = trainer("single_device", 1).validate(module, DataLoader(Samples(13), batch_size=2), verbose=False)
    assert run.callback_metrics["val_loss"] == pytest.approx(expected[0]["val_loss"])


def test_a_stream_that_cannot_share_itself_out_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"Stream is an IterableDataset.*`shard\(num_shards, index\)`"):
        trainer().fit(numbered(), DataLoader(Stream(range(4)), batch_size=2))


def test_loaders_are_left_alone_without_use_distributed_sampler() -> None:
    module = numbered()
    trainer(use_distributed_sampler=False, max_epochs=1).fit(module, DataLoader(Samples(4), batch_size=2))
    assert module.seen == [[[[0, 1], [2, 3]], [[0, 1], [2, 3]]]]


@pytest.mark.thorough
def test_loaders_with_workers_start_them_as_in_the_parent() -> None:
    """Which takes a collate function that cannot be pickled."""
    one, many = numbered(), numbered()
    fit(one, "single_device", 1, max_epochs=1)
    collate: Callable[[Any], Any] = lambda samples: default_collate(samples)  # noqa: E731
    trainer(max_epochs=1).fit(many, DataLoader(Samples(16), batch_size=2, num_workers=1, collate_fn=collate))
    assert_equal(one, many, 1e-12)
