"""The same weights to the bit on one GPU, in one process and in two that share it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from equipoise import Trainer, VirtualDevicesStrategy
from tests.gpu.runs import GPU, QUIET, weights

pytestmark = pytest.mark.not_simulated("kernels of their own")

SAMPLES = 72


class Noisy(LightningModule):
    """Statistics of a batch, dropout, convolutions, and a logged mean."""

    def __init__(self) -> None:
        super().__init__()
        convolution = nn.Conv1d(1, 4, 3, padding=1)
        layers = [nn.Flatten(), nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 1)]
        self.net = nn.Sequential(convolution, *layers)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, targets = batch
        noise = torch.randn_like(features)
        loss = nn.functional.mse_loss(self.net((features + 0.01 * noise).unsqueeze(1)), targets)
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(processes: int, **options: Any) -> tuple[list[Tensor], dict[str, float]]:
    """Return the weights and the logged values of a run."""
    torch.manual_seed(5)
    module = Noisy()
    samples = TensorDataset(torch.randn(SAMPLES, 8), torch.randn(SAMPLES, 1))
    trainer = Trainer(
        strategy=VirtualDevicesStrategy(count=4, backend="gloo"),
        devices=[GPU] * processes,
        deterministic=True,
        max_epochs=2,
        **{**QUIET, **options},
    )
    trainer.fit(module, DataLoader(samples, batch_size=16, shuffle=True))
    return weights(module), {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.fixture(autouse=True)
def deterministic_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed"}, {"accumulate_grad_batches": 3}], ids=str)
def test_two_processes_equal_one_to_the_bit(options: dict[str, Any]) -> None:
    expected, expected_values = fit(1, **options)
    actual, values = fit(2, **options)
    for tensor, other in zip(expected, actual, strict=True):
        assert torch.equal(tensor, other)
    assert values == expected_values
