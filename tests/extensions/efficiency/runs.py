"""A perceptron of whose steps the operations are known, and a fit of it."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from equipoise import Efficiency, Trainer
from tests.support.trainer_runs import trainer

__all__ = ["IN", "OF_A_SAMPLE", "Net", "fitted", "loader"]

IN, HIDDEN, OUT = 6, 10, 4
# The backward of the first layer has no gradient of its input.
OF_A_SAMPLE = 2 * (IN * HIDDEN + HIDDEN * OUT) + 2 * IN * HIDDEN + 2 * 2 * HIDDEN * OUT


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(IN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUT))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(samples: int, batch_size: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(samples, IN)), batch_size=batch_size)


def fitted(callback: Efficiency, module: LightningModule, data: Any, **options: Any) -> Trainer:
    run: Trainer = trainer(**{"callbacks": [callback], "devices": ["cpu"], "max_epochs": 2, **options})
    run.fit(module, data)
    return run
