"""Programs that would have other numbers on another number of devices are refused, at the line of the user."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from equipoise import VirtualDevicesStrategy
from equipoise.errors import ConfigurationError, StepError
from tests.extensions.virtual.modules import Noisy, OtherEntries
from tests.extensions.virtual.runs import rows, run, small_trainer
from tests.support.trainer_runs import Small, Stream, loader, refuses, trainer

pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules", "ignore:Sparse CSR tensor support is in beta")


class Counting(MeanMetric):
    """Counts beside its states."""

    seen = 0

    def update(self, *values: Any) -> None:
        self.seen += 1
        super().update(*values)


class Doing(Noisy):
    """Does something more in each training step or evaluation step."""

    def __init__(self, action: Callable[[Any, Any], Any], *, in_evaluation: bool = False) -> None:
        super().__init__()
        self.action, self.in_evaluation = action, in_evaluation
        self.queue = torch.zeros(6)
        self.register_buffer("seen", torch.zeros(0))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.in_evaluation:
            self.action(self, batch)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.in_evaluation:
            self.action(self, batch)
        super().validation_step(batch, batch_idx)


class CountsBesideStates(Noisy):
    def __init__(self) -> None:
        super().__init__()
        self.mean = Counting()


class ReadsGradient(Noisy):
    """Reads the gradient of an earlier batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weight = self.net[0].weight
        loss = super().training_step(batch, batch_idx)
        return loss if weight.grad is None else loss + weight.grad.sum()


def grow(module: Any, batch: Any) -> None:
    module.seen = torch.cat([module.seen, batch[1].flatten()])


def replace_weights(module: Any, batch: Any) -> None:
    module.seldom_used.weight.data = module.seldom_used.weight.data * 0.9


def assign_gradient(module: Any, batch: Any) -> None:
    module.net[0].weight.grad = torch.ones_like(module.net[0].weight)


def set_rate(factor: float, module: Any, batch: Any) -> None:
    for group in module.trainer.optimizers[0].param_groups:
        group["lr"] *= factor


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Doing(lambda module, batch: module.seldom_used.weight.detach().mul_(0.9)),
            "`training_step` changes 'seldom_used.weight'",
        ),
        (lambda: Doing(replace_weights), "`training_step` changes 'seldom_used.weight'"),
        # torch does not count changes by `data`.
        (
            lambda: Doing(lambda module, batch: module.seldom_used.weight.data.mul_(0.9)),
            "`training_step` changes 'seldom_used.weight'",
        ),
        (ReadsGradient, "`training_step` reads or changes the gradient of a parameter.*in a hook"),
        (lambda: Doing(assign_gradient), "`training_step` assigns the gradient of a parameter.*in a hook"),
        (
            lambda: Doing(lambda module, batch: module.queue.mul_(0.9)),
            "changes the tensor 'queue' in place, which is no buffer.*Register it",
        ),
        (lambda: Doing(grow), "gives a buffer another shape"),
        (
            lambda: Doing(lambda module, batch: module.seen.resize_(1), in_evaluation=True),
            "An evaluation step changes 'seen'",
        ),
        (lambda: Doing(partial(set_rate, 0.5)), "changes 'lr' of an optimiser"),
        (CountsBesideStates, "keeps 'seen' beside its states"),
    ],
)
def test_steps_that_change_what_parts_share_are_refused(make: Any, message: str) -> None:
    with pytest.raises(StepError, match=message):
        run(make, 1)


def test_a_learning_rate_that_stays_may_be_set() -> None:
    run(lambda: Doing(partial(set_rate, 1.0)), 1)


class LogsBatchAtItsEnd(Noisy):
    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("at_end", batch[0].mean())


class LogsFirstPart(Noisy):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("at_end", batch[0].mean(), on_epoch=True)


class GathersInEvaluation(Noisy):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.all_gather(batch[0].mean())


class GathersInBackward(Noisy):
    def on_after_backward(self) -> None:
        self.all_gather(torch.zeros(()))


class MakesMetricInStep(Noisy):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not hasattr(self, "late"):
            self.late = MeanMetric()
        self.late.update(batch_idx)
        self.log("late", self.late)
        return super().training_step(batch, batch_idx)


class Shapeless(Noisy):
    """Has a parameter without a shape, on which processes cannot agree."""

    def __init__(self) -> None:
        super().__init__()
        self.lazy = nn.LazyLinear(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (LogsBatchAtItsEnd, "logs 'at_end' with another value in each process"),
        (LogsFirstPart, "logs 'at_end' with another value in each process"),
        (GathersInEvaluation, "communicates with other processes"),
        (GathersInBackward, "communicates with other processes"),
        (OtherEntries, "has 11 entries in one process and 12 in the first one"),
        (MakesMetricInStep, "logged as 'late' was created in a step"),
        (Shapeless, "has no shape yet"),
    ],
)
def test_programs_that_depend_on_processes_are_refused(kind: type[Noisy], message: str) -> None:
    with pytest.raises((StepError, ConfigurationError), match=message) as caught:
        run(kind, 2, num_sanity_val_steps=0)
    assert not any("Releasing failed" in note for note in getattr(caught.value, "__notes__", ()))


def test_a_part_of_one_sample_is_named_where_statistics_need_two() -> None:
    message = "Part 0 of the step has one sample.*BatchNorm.*into 8 parts.*at least 16 samples.*smaller `count`"
    with pytest.raises(StepError, match=message):
        run(Noisy, 1, batch_size=8)


def by_hand() -> None:
    module = Small()
    module.automatic_optimization = False
    trainer(strategy=VirtualDevicesStrategy(count=2)).fit(module, loader())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: VirtualDevicesStrategy(count=0), ["count must be an integer of at least"]),
        (lambda: VirtualDevicesStrategy(threads=0), ["threads must be an integer of at least"]),
        (lambda: VirtualDevicesStrategy(shares=[1, 0]), ["shares must be a number above 0"]),
        (lambda: VirtualDevicesStrategy(shares="auto"), ["give one_process=True"]),
        (lambda: VirtualDevicesStrategy(one_process="false"), ["one_process must be True or False"]),  # type: ignore[arg-type]
        (lambda: run(Noisy, 3, count=2), ["count=2", "3 real ones"]),
        (lambda: run(Noisy, 2, shares=[1, 2, 3]), ["3 numbers for 2 devices"]),
        (lambda: run(Noisy, 1, sync_batchnorm=True), ["sync_batchnorm=True"]),
        (lambda: run(Noisy, 1, use_distributed_sampler=False), ["use_distributed_sampler=False", "divides them"]),
        (
            lambda: small_trainer().fit(Noisy(), {"one": rows(8), "other": [rows(8)]}),
            ["one training loader, but several"],
        ),
        (by_hand, ["Small optimises by hand", "strategy='ddp'"]),
        pytest.param(
            lambda: run(Noisy, 2, val=[DataLoader(Stream(4), batch_size=2)]),
            ["evaluation to several processes"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_options_that_are_refused(call: Callable[[], Any], words: list[str]) -> None:
    refuses(call, *words)
