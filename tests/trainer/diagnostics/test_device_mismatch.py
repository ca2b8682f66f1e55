"""An error about devices names the tensor that lies on another one."""

from typing import Any

import lightning as L
import pytest
import torch

from equipoise import StepError
from equipoise.trainer.optimization.steps.module_step import ModuleStep
from tests.support.contexts import training_context


class Broken(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise RuntimeError("Expected all tensors to be on the same device, but found at least two.")


def test_it_is_named_in_a_step_and_in_a_part_of_one() -> None:
    module = Broken()
    step = ModuleStep(training_context(module), "training_step")
    batch = {"x": torch.zeros(2), "mask": torch.zeros(2, device="meta")}
    for run in (lambda: step.run(batch), lambda: step.run_on(module, batch, 2)):
        with pytest.raises(StepError, match=r"mask.* is on meta"):
            run()
