"""A step of the user's module, called directly."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from equipoise.trainer.optimization.module_step import ModuleStep
from tests.support.contexts import training_context


class Doubling(L.LightningModule):
    """Returns twice its batch, plus the index of the batch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return 2 * batch + batch_idx


class TestFunctionOfTheStrategy:
    @pytest.fixture
    def step(self) -> ModuleStep:
        return ModuleStep(training_context(Doubling()), "training_step")

    def test_without_one_the_step_is_plain(self, step: ModuleStep) -> None:
        assert step.is_plain
        assert step.run(torch.tensor(3.0)) == 6

    def test_the_forward_runs_inside_it(self, step: ModuleStep) -> None:
        batches = []

        def around(compute: Callable[[], Any], batch: Any) -> Any:
            batches.append(batch)
            return compute() + 1

        step.run_inside(around)
        assert not step.is_plain
        assert step.run(torch.tensor(3.0)) == 7
        assert batches == [torch.tensor(3.0)]

    def test_a_later_one_replaces_it(self, step: ModuleStep) -> None:
        step.run_inside(lambda compute, batch: compute() + 1)
        step.run_inside(lambda compute, batch: compute() + 10)
        assert step.run(torch.tensor(3.0)) == 16
