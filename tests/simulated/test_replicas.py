"""Replicas on two devices exchange parameters and gradients of every dtype in few messages."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.pipelines import quiet


class Spectrum(L.LightningModule):
    """Multiplies by complex numbers, between real parameters of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        self.before = nn.Parameter(torch.randn(3, generator=draw, dtype=torch.float64))
        self.filter = nn.Parameter(torch.randn(5, 3, generator=draw, dtype=torch.complex128))
        self.after = nn.Parameter(torch.randn(1, generator=draw, dtype=torch.float64))
        self.last = nn.Parameter(torch.randn(2, generator=draw, dtype=torch.complex128))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        filtered = self.filter * (batch[0] * self.before).unsqueeze(1)
        return (filtered.sum(-1) * self.after * self.last.sum()).abs().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fit(strategy: str, devices: int) -> Spectrum:
    draw = torch.Generator().manual_seed(4)
    data = TensorDataset(torch.randn(21, 3, generator=draw, dtype=torch.float64))
    module = Spectrum()
    trainer = quiet(strategy=strategy, devices=["cpu"] * devices, max_epochs=2)
    trainer.fit(module, DataLoader(data, 5))
    return module


@pytest.mark.parametrize("strategy", ["dp", "balanced"])
def test_complex_parameters(strategy: str) -> None:
    expected = fit("single_device", 1)
    actual = fit(strategy, 2)
    for mine, theirs in zip(actual.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs.cpu(), rtol=1e-12, atol=1e-12)
