"""An optimiser's step that runs out of memory, called directly."""

from typing import Any

import lightning as L
import pytest
import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Adam

from equipoise import Callback
from equipoise.parallel.step_protocols import StepResult
from equipoise.parallel.strategy_optimizer import StrategyOptimizer
from equipoise.trainer.recovery.micro_batching import MicroBatcher
from equipoise.trainer.recovery.repeatable_optimizer import RepeatableOptimizer
from tests.support.contexts import training_context

ERROR = torch.OutOfMemoryError("CUDA out of memory.")


class Weight(L.LightningModule):
    """One weight of 1 with a gradient of 4."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
        self.weight.grad = torch.tensor([4.0], dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Any: ...


class Answers(Callback):
    """Answers every error with a number of micro-batches.

    Args:
        answer: The number. None: the error is raised.
    """

    def __init__(self, answer: int | None) -> None:
        self.answer = answer
        self.events: list[Any] = []

    def on_out_of_memory(self, trainer: Any, pl_module: Any, event: Any) -> int | None:
        self.events.append(event)
        return self.answer


class Failing(SGD):
    """Runs out of memory.

    Args:
        parameters: The parameters.
        failures: In how many of the first steps.
        late: Whether it fails after it has changed parameters.
    """

    def __init__(self, parameters: Any, failures: int, *, late: bool = False) -> None:
        super().__init__(parameters, lr=0.125)
        self.failures = failures
        self.late = late
        self.steps = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.steps += 1
        fails = self.steps <= self.failures
        if fails and not self.late:
            raise ERROR
        loss = super().step(closure)
        if fails:
            raise ERROR
        return loss


class Building(Adam):
    """Runs out of memory in its first step, after it has made a part of its state."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        if not self.state:
            parameter = self.param_groups[0]["params"][0]
            self.state[parameter]["step"] = torch.tensor(7.0)
            raise ERROR
        return super().step(closure)


def repeatable(module: Weight, optimizer: Any, callback: Answers) -> RepeatableOptimizer:
    context = training_context(module, optimizer, callbacks=[callback])
    micro_batcher = MicroBatcher(context, lambda parts, is_last: StepResult(None, None, None))
    return RepeatableOptimizer(StrategyOptimizer(optimizer), micro_batcher, lambda: 5)


def test_a_step_that_changed_nothing_is_repeated() -> None:
    module, callback = Weight(), Answers(1)
    repeatable(module, Failing(module.parameters(), 1), callback).step()
    assert module.weight.item() == 0.5
    assert [(event.phase, event.batch_idx, event.can_repeat) for event in callback.events] == [
        ("optimizer step", 5, True)
    ]


def test_it_is_repeated_once() -> None:
    module, callback = Weight(), Answers(1)
    optimizer = Failing(module.parameters(), 2)
    with pytest.raises(torch.OutOfMemoryError, match="The step was done once more already"):
        repeatable(module, optimizer, callback).step()
    assert optimizer.steps == 2
    assert [event.can_repeat for event in callback.events] == [True, False]


def test_a_step_that_changed_parameters_is_not_repeated() -> None:
    module, callback = Weight(), Answers(1)
    optimizer = Failing(module.parameters(), 1, late=True)
    with pytest.raises(torch.OutOfMemoryError, match="had changed something already"):
        repeatable(module, optimizer, callback).step()
    assert optimizer.steps == 1


@pytest.mark.parametrize("answer", [None, 0])
def test_the_error_is_raised_if_no_callback_wants_another_attempt(answer: int | None) -> None:
    module = Weight()
    optimizer = Failing(module.parameters(), 1)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        repeatable(module, optimizer, Answers(answer)).step()
    assert optimizer.steps == 1


def test_state_that_the_first_attempt_made_is_dropped() -> None:
    module = Weight()
    optimizer = Building(module.parameters(), lr=0.1)
    repeated = repeatable(module, optimizer, Answers(1))
    with pytest.raises(torch.OutOfMemoryError, match="The step was done once more already"):
        repeated.step()
    # The second attempt found no state either, else it would have stepped from 7.
    assert module.weight.item() == 1.0


def test_an_error_within_a_closure_is_left_to_those_who_computed_it() -> None:
    module, callback = Weight(), Answers(1)

    def closure() -> None:
        raise ERROR

    with pytest.raises(torch.OutOfMemoryError) as caught:
        repeatable(module, Failing(module.parameters(), 0), callback).step(closure)
    assert caught.value is ERROR
    assert callback.events == []


def test_a_step_with_a_closure_is_not_repeated() -> None:
    module, callback = Weight(), Answers(1)
    with pytest.raises(torch.OutOfMemoryError, match="in a closure is not done again"):
        repeatable(module, Failing(module.parameters(), 1, late=True), callback).step(lambda: None)
    assert [event.can_repeat for event in callback.events] == [False]


def test_other_errors_are_raised_as_they_are() -> None:
    class Broken(SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            raise RuntimeError("broken")

    module, callback = Weight(), Answers(1)
    with pytest.raises(RuntimeError, match=r"^broken$"):
        repeatable(module, Broken(module.parameters(), lr=1.0), callback).step()
    assert callback.events == []


def test_a_scaled_step_is_repeated_too() -> None:
    module = Weight()
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    optimizer = repeatable(module, Failing(module.parameters(), 1), Answers(1))
    optimizer.unscale(scaler)
    optimizer.scaled_step(scaler)
    assert module.weight.item() == 1.0 - 0.125 * 4 / 8
