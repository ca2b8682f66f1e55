"""An optimiser's step that runs out of memory, called directly."""

from itertools import count
from typing import Any

import lightning as L
import pytest
import torch
from torch.optim import Adam

from equipoise.parallel.step_protocols import StepResult
from equipoise.parallel.strategy_optimizer import StrategyOptimizer
from equipoise.trainer.recovery.micro_batching import MicroBatcher
from equipoise.trainer.recovery.repeatable_optimizer import RepeatableOptimizer
from tests.support.equality import assert_equal
from tests.support.run_parts import parts_of_fit
from tests.trainer.recovery.out_of_memory import Answers, run_out

DOUBLE = torch.float64


class Building(Adam):
    """Runs out of memory in its first step, after it has made a part of its state."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        if not self.state:
            parameter = self.param_groups[0]["params"][0]
            self.state[parameter]["step"] = torch.tensor(7.0)
            run_out()
        return super().step(closure)


class Two(L.LightningModule):
    """Two weights, of which one has no gradient yet."""

    def __init__(self) -> None:
        super().__init__()
        self.old = torch.nn.Parameter(torch.ones(2, dtype=DOUBLE))
        self.new = torch.nn.Parameter(torch.ones(2, dtype=DOUBLE))
        self.old.grad = torch.ones(2, dtype=DOUBLE)

    def training_step(self, batch: Any, batch_idx: int) -> Any: ...


def repeated_step(module: Any, optimizer: Any) -> RepeatableOptimizer:
    parts = parts_of_fit(module, optimizer, callbacks=[Answers(1)])
    micro_batcher = MicroBatcher(*parts, lambda parts, is_last: StepResult(None, None, None))
    return RepeatableOptimizer(StrategyOptimizer(optimizer), micro_batcher, lambda: 5)


def fails_once(monkeypatch: pytest.MonkeyPatch, name: str, call: int) -> None:
    """Let one call of a function of torch run out of memory."""
    original = getattr(torch, name)
    calls = count(1)

    def function(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            run_out()
        return original(*args, **kwargs)

    monkeypatch.setattr(torch, name, function)


# Memory runs out after the new step has been counted, and between the two averages of the new state.
@pytest.mark.parametrize(
    ("foreach", "old_steps", "name", "call"), [(True, False, "_foreach_lerp_", 1), (False, True, "zeros_like", 2)]
)
def test_state_that_a_parameter_first_gets_in_the_failed_step(
    monkeypatch: pytest.MonkeyPatch, foreach: bool, old_steps: bool, name: str, call: int
) -> None:
    modules = [Two(), Two()]
    optimizers = [Adam(module.parameters(), lr=0.1, foreach=foreach) for module in modules]
    steps = [repeated_step(modules[0], optimizers[0]), optimizers[1]]
    for module, step in zip(modules, steps, strict=True):
        step.step()
        module.new.grad = torch.ones(2, dtype=DOUBLE)
        if not old_steps:
            module.old.grad = None
    optimizers[1].step()
    fails_once(monkeypatch, name, call)
    steps[0].step()
    assert_equal(modules[1], modules[0])
    assert_equal(optimizers[1].state_dict()["state"], optimizers[0].state_dict()["state"])


class Amending(Adam):
    """Runs out of memory after it has put something into a state that was there."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for state in self.state.values():
            state["maximum"] = torch.zeros(2)
            run_out()
        return super().step(closure)


def test_state_with_a_new_key_is_a_change() -> None:
    module = Two()
    repeated = repeated_step(module, Amending(module.parameters()))
    repeated.step()
    with pytest.raises(torch.OutOfMemoryError, match="had changed something already"):
        repeated.step()


def test_state_that_the_first_attempt_made_is_dropped() -> None:
    module = Two()
    repeated = repeated_step(module, Building(module.parameters(), lr=0.1))
    with pytest.raises(torch.OutOfMemoryError, match="The step was done once more already"):
        repeated.step()
    # The second attempt found no state either, else it would have stepped from 7.
    assert_equal(Two(), module)
