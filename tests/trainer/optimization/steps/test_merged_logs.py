"""Numbers that parts of a batch log are those of one device."""

import math
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.support.pipelines import quiet

NUMBERS = {"small": 1.5, "whole": 3, "truth": True, "large": 1e39, "larger": 2**70, "infinite": math.inf}


class LogsNumbers(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for name, number in NUMBERS.items():
            self.log(name, number, on_epoch=True)
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def logged(strategy: str, devices: int, precision: Any) -> dict[str, float]:
    trainer = quiet(strategy=strategy, devices=["cpu"] * devices, max_epochs=1, precision=precision)
    trainer.fit(LogsNumbers(), DataLoader(torch.ones(5, 2), 4))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_numbers_of_any_size(precision: str) -> None:
    """Also those that the dtype of the logged values cannot hold."""
    expected = logged("single_device", 1, precision)
    assert expected["large_step"] == (math.inf if precision == "32-true" else 1e39)
    assert logged("dp", 2, precision) == expected
