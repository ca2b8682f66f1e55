"""Strategies that compute several gradients of a batch: each batch counts once in its window."""

from collections.abc import Sequence
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from equipoise import Splitter, StepError, StepResult, Strategy, Trainer


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 1, dtype=torch.float64)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class InParts(Strategy):
    """Compute one and three quarters of a batch's samples, each with a backward of its own.

    Args:
        announces: Whether the parts are announced.
    """

    name = "in_parts"

    def __init__(self, *, announces: bool = True) -> None:
        self.announces = announces

    def forward_backward(self, step: Any, parts: Sequence[Any], last: bool) -> StepResult:
        splitter = Splitter(self._module)
        size = splitter.size_to_cut(parts[0])
        sizes = [size // 4, size - size // 4]
        for part, samples in zip(splitter.parts(parts[0], sizes), sizes, strict=True):
            if self.announces:
                step.begin_micro_batch(samples, size)
            result: StepResult = step(part)
            step.backward(result)
        return result


def fit(strategy: Any, accumulate: int) -> torch.Tensor:
    module = Regression()
    data = DataLoader(torch.randn(28, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), batch_size=8)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        accumulate_grad_batches=accumulate,
        precision="64-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, data)
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach()


@pytest.mark.parametrize("accumulate", [1, 3])
def test_announced_parts_count_by_their_samples(accumulate: int) -> None:
    torch.testing.assert_close(fit(InParts(), accumulate), fit("single_device", accumulate), rtol=0, atol=1e-12)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_second_backward_of_a_batch_is_refused(accumulate: int) -> None:
    with pytest.raises(StepError, match=r"a second time for the batch 0.*begin_micro_batch.*autograd\.grad"):
        fit(InParts(announces=False), accumulate)
