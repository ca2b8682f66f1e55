"""Memory that runs out in the step of an optimiser, and in steps that the module does by hand."""

import warnings
import weakref
from contextlib import nullcontext
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise import OOMRecovery
from tests.support.batches import SIZES
from tests.support.equality import assert_equal
from tests.support.networks.transparency import Mlp
from tests.trainer.recovery.out_of_memory import Answers, OutOfMemory, fit, run_out

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:Batch \d+ (of \d+ samples?|ran out)"),
    pytest.mark.usefixtures("quick_collections"),
]


class LowOnMemory(torch.optim.SGD):
    """Runs out of memory in some of its steps, counted from 0; before or after it has changed anything."""

    def __init__(self, parameters: Any, failing: tuple[int, ...], after: bool) -> None:
        super().__init__(parameters, lr=0.1)
        self.failing, self.after, self.calls = failing, after, 0

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.calls += 1
        fails = self.calls - 1 in self.failing
        if fails and not self.after:
            run_out()
        super().step()
        if fails:
            run_out()
        return loss


class Optimised(Mlp):
    """Has such an optimiser; bare: its step takes no closure, as those of torch, called directly."""

    def __init__(self, failing: tuple[int, ...] = (), after: bool = False, bare: bool = True) -> None:
        super().__init__()
        self.given, self.bare = (failing, after), bare

    def configure_optimizers(self) -> Any:
        own = LowOnMemory(self.parameters(), *self.given)
        if not self.bare:
            return own
        optimizer: Any = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.step = lambda: own.step()
        return optimizer


@pytest.mark.parametrize(
    ("answer", "goes_on"),
    [("split", True), ("skip", True), ("raise", False), (None, False), (0, False), (1, True)],
)
def test_a_policy_or_a_callback_decides_about_the_step_of_the_optimizer(answer: Any, goes_on: bool) -> None:
    is_policy = isinstance(answer, str)
    callback: Any = OOMRecovery(answer) if is_policy else Answers(answer)  # type: ignore[arg-type]
    if goes_on:
        told = r"Batch 1 ran out .* in optimizer step\. It is done once more\."
        with pytest.warns(UserWarning, match=told) if is_policy else nullcontext():
            assert fit(Optimised((1,)), callback, max_epochs=1).global_step == len(SIZES)
    else:
        with pytest.raises(torch.OutOfMemoryError, match=r"Batch 1 ran .* in optimizer step.*smaller batches would"):
            fit(Optimised((1,)), callback, max_epochs=1)
    assert [(event.phase, event.can_repeat) for event in callback.events] == [("optimizer step", True)]
    assert getattr(callback, "skipped", 0) == 0


@pytest.mark.parametrize(("failing", "after", "events"), [((1,), True, [False]), ((1, 2), False, [True, False])])
def test_an_optimizer_step_that_cannot_be_done_again_is_an_error(
    failing: tuple[int, ...], after: bool, events: list[bool]
) -> None:
    """Something was changed, or it is the second time: nothing is announced that is not done."""
    recovery = OOMRecovery()
    with pytest.raises(torch.OutOfMemoryError, match=r"in optimizer step.* already.*smaller batches would not"):
        fit(Optimised(failing, after), recovery)
    assert [event.can_repeat for event in recovery.events] == events


class Changing(Mlp):
    """Memory runs out in a step of the optimiser, counted from 0, that has put something into its state."""

    def __init__(self, failing: int) -> None:
        super().__init__()
        self.failing = failing
        self.left = lambda: None

    def configure_optimizers(self) -> Any:
        optimizer: Any = torch.optim.Adam(self.parameters(), lr=0.1)
        step, calls = optimizer.step, count()

        def changing() -> Any:
            assert self.left() is None  # what a failed step holds in a cycle is freed before the next one
            if next(calls) == self.failing:
                cycle: Any = nn.Identity()
                cycle.__dict__["itself"] = cycle
                self.left = weakref.ref(cycle)
                parameter = optimizer.param_groups[0]["params"][0]
                optimizer.state[parameter]["step" if self.failing == 0 else "maximum"] = torch.tensor(7.0)
                run_out()
            return step()

        optimizer.step = changing
        return optimizer


def test_state_that_the_first_attempt_of_a_step_has_made_is_dropped() -> None:
    modules = []
    for failing in (-1, 0):
        torch.manual_seed(7)
        modules.append(module := Changing(failing))
        fit(module, Answers(1), max_epochs=1)
    assert_equal(modules[0], modules[1])


def test_a_new_entry_in_a_state_is_a_change_after_which_a_step_is_not_done_again() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="had changed something already"):
        fit(Changing(1), Answers(1), max_epochs=1)


@pytest.mark.parametrize(("policy", "overridden"), [("split", False), ("skip", True)])
def test_an_optimizer_step_that_takes_a_closure_is_not_done_again(policy: Any, overridden: bool) -> None:
    """An optimiser that is not torch's, or an `optimizer_step` of the module."""
    module: Any = Optimised((1,), bare=False)
    if overridden:
        module.optimizer_step = lambda epoch, batch_idx, optimizer, closure: optimizer.step(closure=closure)
    message = r"Batch 1 ran .* in optimizer step.* closure .*would help"
    with pytest.raises(torch.OutOfMemoryError, match=message) as error:
        fit(module, recovery := OOMRecovery(policy))
    assert "The allocator said: injected" in str(error.value)
    assert [(event.phase, event.can_repeat) for event in recovery.events] == [("optimizer step", False)]


def test_batches_are_cut_within_a_closure() -> None:
    """And errors in the closure are told once."""
    injected = OutOfMemory(most=6)
    fit(injected.wrap(Optimised(bare=False)), OOMRecovery())
    assert max(injected.sizes) <= 6
    with pytest.raises(torch.OutOfMemoryError, match="A single sample does not fit") as error:
        fit(OutOfMemory(most=0).wrap(Optimised(bare=False)), recovery := OOMRecovery())
    assert str(error.value).count("The allocator said") == 1
    assert {event.phase for event in recovery.events} == {"forward"}


class ByHand(Mlp):
    """Optimises by hand, with or without a closure; runs out of memory at a place in the second step."""

    def __init__(self, place: str, has_closure: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.place, self.has_closure = place, has_closure

    def training_step(self, batch: Any, batch_idx: int) -> None:
        place = self.place if batch_idx == 1 else ""
        optimizer: Any = self.optimizers()
        if place == "forward":
            run_out()
        if place == "optimizer step":
            hooks = optimizer.optimizer
            register = hooks.register_step_post_hook if self.has_closure else hooks.register_step_pre_hook
            register(run_out)

        def closure() -> Tensor:
            loss: Tensor = Mlp.training_step(self, batch, batch_idx)
            optimizer.zero_grad()
            if place == "backward":
                loss.register_hook(run_out)
            self.manual_backward(loss)
            if place == "training step":
                run_out()
            return loss

        if self.has_closure:
            optimizer.step(closure=closure)
        else:
            closure()
            optimizer.step()
        if place == "after the step":
            run_out()


@pytest.mark.parametrize(
    ("place", "has_closure", "policy"),
    [
        ("forward", False, "split"),
        ("backward", False, "skip"),
        ("optimizer step", False, "split"),
        ("after the step", False, "raise"),
        # The closure is a step of its own within that of the optimiser.
        ("training step", True, "split"),
        ("backward", True, "raise"),
        ("optimizer step", True, "skip"),
    ],
)
def test_manual_optimisation_says_where_memory_ran_out_and_that_it_cannot_repeat_the_step(
    place: str, has_closure: bool, policy: Any
) -> None:
    """And announces nothing else; where it was is told as far as anybody knows."""
    phase = "training step" if place == "after the step" else place
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Batch")
        with pytest.raises(torch.OutOfMemoryError, match=f"Batch 1 of .* on cpu in {phase}\\..* optimises by hand"):
            fit(ByHand(place, has_closure), recovery := OOMRecovery(policy))
    (event,) = recovery.events
    assert (event.phase, event.most_parts, event.can_repeat, recovery.skipped) == (phase, 1, False, 0)
    assert "optimises by hand" in event.obstacle
