"""An optimiser's step that runs out of memory, called directly."""

from typing import Any

import lightning as L
import pytest
import torch
from torch.optim import Adam

from equipoise import Callback
from equipoise.parallel.step_protocols import StepResult
from equipoise.parallel.strategy_optimizer import StrategyOptimizer
from equipoise.trainer.recovery.micro_batching import MicroBatcher
from equipoise.trainer.recovery.repeatable_optimizer import RepeatableOptimizer
from tests.support.contexts import training_context


class Weight(L.LightningModule):
    """One weight of 1 with a gradient of 4."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
        self.weight.grad = torch.tensor([4.0], dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Any: ...


class Repeats(Callback):
    """Wants each step once more."""

    def on_out_of_memory(self, trainer: Any, pl_module: Any, event: Any) -> int:
        return 1


class Building(Adam):
    """Runs out of memory in its first step, after it has made a part of its state."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        if not self.state:
            parameter = self.param_groups[0]["params"][0]
            self.state[parameter]["step"] = torch.tensor(7.0)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().step(closure)


def test_state_that_the_first_attempt_made_is_dropped() -> None:
    module = Weight()
    optimizer = Building(module.parameters(), lr=0.1)
    context = training_context(module, optimizer, callbacks=[Repeats()])
    micro_batcher = MicroBatcher(context, lambda parts, is_last: StepResult(None, None, None))
    repeated = RepeatableOptimizer(StrategyOptimizer(optimizer), micro_batcher, lambda: 5)
    with pytest.raises(torch.OutOfMemoryError, match="The step was done once more already"):
        repeated.step()
    # The second attempt found no state either, else it would have stepped from 7.
    assert module.weight.item() == 1.0
