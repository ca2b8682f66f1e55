"""Some processes run out of memory, others do not: none waits forever, and gradients are exact and the same in all."""

import random
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from equipoise import DDPStrategy, OOMRecovery, RunReport, StepError
from equipoise.strategies.ddp.recovery import DDPRecovery
from tests.strategies.runs import trainer
from tests.support.equality import assert_equal
from tests.support.networks.numbered import Samples, has_same_weights_everywhere
from tests.support.pairs import pairwise

pytestmark = pytest.mark.filterwarnings(r"ignore:Batch \d+ of \d+ samples")


class Fragile(L.LightningModule):
    """Runs out of memory in some steps of some processes.

    Args:
        failing: Process, step and place: "forward", "backward" or "late", when all gradients but the first layer's are
            there.
        most: More samples than this do not fit into process 1.
    """

    def __init__(self, failing: set[tuple[int, int, str]], most: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.rest = nn.Linear(4, 6), nn.Sequential(nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        self.failing, self.most, self.same = failing, most, True
        self.seen: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.first(batch[0])
        place = ""
        for each in ("forward", "backward", "late") if len(batch[0]) > 1 else ():
            if (self.global_rank, self.global_step, each) in self.failing:
                self.failing.discard((self.global_rank, self.global_step, each))
                place = each
        if self.global_rank == 1 and len(batch[0]) > self.most:
            place = place or "late"
        if place == "late":
            hidden.register_hook(self.fail)
        loss = nn.functional.cross_entropy(self.rest(hidden), batch[1])
        if place == "forward":
            raise torch.OutOfMemoryError("injected in forward")
        if place == "backward":
            loss.register_hook(self.fail)
        if not place:
            self.seen.append(batch[2].tolist())
        self.log("loss", loss, on_epoch=True)
        return loss

    @staticmethod
    def fail(gradient: Tensor) -> None:
        raise torch.OutOfMemoryError("injected in backward")

    def on_train_epoch_end(self) -> None:
        self.same = self.same and has_same_weights_everywhere(self)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run(module: Fragile, strategy: Any, devices: int, **options: Any) -> Any:
    fitted = trainer(strategy, devices, **options)
    fitted.fit(module, DataLoader(Samples(29), batch_size=12 // devices))
    return fitted


@pytest.mark.quick_cases(3)
@pytest.mark.thorough
@pytest.mark.parametrize(("processes", "window"), [(2, 1), (2, 3), (3, 1), (3, 2)])
def test_a_step_done_again_in_parts_has_the_gradients_of_one_device(processes: int, window: int) -> None:
    """Whatever fails, drawn anew each time. With tiny buckets most gradients are with the others already."""
    print("seed:", seed := random.randrange(10**6))
    draw = random.Random(seed)
    places = [(r, s, p) for r in range(processes) for s in range(6) for p in ("forward", "backward", "late")]
    one, many = Fragile(set(), 99), Fragile({(1, 0, "late"), *draw.sample(places, 5)}, draw.randint(1, 6))
    strategy = DDPStrategy(bucket_megabytes=draw.choice([1e-5, 1]))
    expected = run(one, "single_device", 1, accumulate_grad_batches=window)
    callbacks = [recovery := OOMRecovery(grow_after=2)]
    actual = run(many, strategy, processes, accumulate_grad_batches=window, callbacks=callbacks)
    assert_equal(one, many, 1e-12)
    assert many.same
    assert recovery.events
    assert {event.phase for event in recovery.events} <= {"forward", "backward"}
    assert_equal(*(float(fitted.callback_metrics["loss_epoch"]) for fitted in (expected, actual)), 1e-12)


@pytest.mark.thorough
def test_a_batch_of_which_others_have_a_part_cannot_be_left_out() -> None:
    module = Fragile({(1, 1, "late")}, 99)
    with pytest.raises(torch.OutOfMemoryError, match="injected in backward"):
        run(module, DDPStrategy(bucket_megabytes=1e-5), 2, callbacks=[OOMRecovery("skip")])
    module = Fragile({(1, 1, "forward")}, 99)
    run(module, "ddp", 2, callbacks=[OOMRecovery("skip")])
    assert module.same


class Compared(L.Callback):
    """Sees after training that all processes know the same, and how many warnings each one has given."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.catching = warnings.catch_warnings(record=True)
        self.caught: Any = self.catching.__enter__()
        warnings.simplefilter("always")

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.catching.__exit__(None, None, None)
        own = [str(each.message) for each in self.caught if "ran out of memory" in str(each.message)]
        del self.catching, self.caught
        (recovery,) = [callback for callback in trainer.callbacks if isinstance(callback, OOMRecovery)]
        first, *others = trainer.strategy.gather_objects((recovery.events, recovery.skipped))
        module.same = module.same and all(other == first for other in others)
        module.told = trainer.strategy.gather_objects(own)


@pytest.mark.thorough
@pytest.mark.parametrize("policy", ["split", "skip"])
def test_all_processes_know_of_each_event(policy: Any, tmp_path: Path) -> None:
    """By a warning of the process that failed, in `events` and in the report; each event once, also of a second fit."""
    callbacks: list[L.Callback] = [recovery := OOMRecovery(policy), Compared(), RunReport()]
    expected: list[tuple[int, int]] = []
    for failing in ([(1, 1), (2, 0), (2, 1)], [(1, 1)]):  # steps and processes
        module = Fragile({(rank, step, "forward") for step, rank in failing}, 99)
        fitted = trainer("ddp", 2, callbacks=callbacks, default_root_dir=tmp_path, max_epochs=1)
        fitted.fit(module, DataLoader(Samples(29), batch_size=6))
        callbacks = fitted.callbacks
        assert module.same
        expected += failing
        assert [event.step for event in recovery.events] == [step for step, _ in expected]
        assert sorted((event.step, event.global_rank) for event in recovery.events) == sorted(expected)
        assert recovery.skipped == (len(expected) if policy == "skip" else 0)
        for rank, told in enumerate(module.told):
            assert len(told) == sum(each == rank for _, each in failing)
            assert all((" of rank 1 " if rank else " on cpu in ") in text and " It is " in text for text in told)
        assert "of rank 1 in forward." in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_without_a_callback_the_error_ends_the_run() -> None:
    with pytest.raises((torch.OutOfMemoryError, StepError), match="injected in forward"):
        run(Fragile({(1, 1, "forward")}, 99), "ddp", 2)


class Talking(Fragile):
    """Communicates in its forward, as SyncBatchNorm does; may also fail "first", before anything was exchanged."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if (self.global_rank, self.global_step, "first") in self.failing and len(batch[0]) > 1:
            raise torch.OutOfMemoryError("injected before the exchange")
        torch.distributed.all_reduce(torch.ones(3))
        return super().training_step(batch, batch_idx)


REASON = "All processes communicate in the forward, so one cannot do its step again alone. Take a smaller batch_size"


@pytest.mark.quick_cases(3)
@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("place", "policy", "step"),
    [*pairwise(["first", "forward", "backward", "late"], ["split", "skip"], [0, 1]), ("first", "skip", 0)],
)
def test_communication_within_the_forward_ends_all_processes_with_the_reason(
    step: int, place: str, policy: Any
) -> None:
    """None waits until time is up for one that does its step again."""
    reason = REASON
    if (step, place) == (0, "first"):  # nothing was exchanged yet, so nobody could know
        reason = "the others compute theirs as a whole" if policy == "split" else "it is not known yet whether others"
    strategy = DDPStrategy(timeout=3600, bucket_megabytes=1e-5)
    with pytest.raises((torch.OutOfMemoryError, StepError), match=reason) as caught:
        run(Talking({(1, step, place)}, 99), strategy, 2, callbacks=[OOMRecovery(policy)])
    assert "Raised in rank 1 of 2." in caught.value.__notes__


def test_communication_does_no_harm_without_an_error() -> None:
    one, many = Fragile(set(), 99), Talking(set(), 99)
    run(one, "single_device", 1)
    run(many, "ddp", 2, callbacks=[OOMRecovery()])
    assert_equal(one, many, 1e-12)


def test_communication_in_an_evaluation_ends_it_with_the_reason() -> None:
    class Gathers(Fragile):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.all_gather(batch[0].mean())
            if self.global_rank == 1 and len(batch[0]) > 2:
                raise torch.OutOfMemoryError("injected in the evaluation")

    fitted = trainer(DDPStrategy(timeout=300), 2, callbacks=[OOMRecovery()])
    with pytest.raises(torch.OutOfMemoryError, match=REASON):
        fitted.validate(Gathers(set(), 99), DataLoader(Samples(24), batch_size=6), verbose=False)


def test_layers_that_are_known_to_communicate() -> None:
    module: Any = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    recovery = DDPRecovery(module, MagicMock(), MagicMock())
    recovery.enable()
    assert recovery.why_not(training=True, leave_out=False).startswith(REASON)
    assert not recovery.why_not(training=False, leave_out=False)  # with running statistics


@pytest.mark.thorough
def test_shares_are_measured_while_windows_are_done_again() -> None:
    """A window that one process computes twice is measured once, or the others would wait for it."""
    one, many = Fragile(set(), 99), Fragile({(1, step, "backward") for step in range(4)}, 99)
    fitted = trainer("single_device", 1, accumulate_grad_batches=3)
    fitted.fit(one, DataLoader(Samples(160), batch_size=16))
    strategy = DDPStrategy(shares="auto", timeout=300)
    fitted = trainer(strategy, 2, accumulate_grad_batches=3, callbacks=[OOMRecovery(grow_after=1)])
    fitted.fit(many, DataLoader(Samples(160), batch_size=8))
    assert strategy.shares is not None
    assert_equal(one, many, 1e-12)
    assert many.same
