"""Several optimisers in automatic optimisation: equal to a loop written by hand, under each strategy, and resumed."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Muon
from torch.optim.lr_scheduler import ExponentialLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

from equipoise import HogwildStrategy, PipelineStrategy
from tests.support.pipelines import quiet

FEATURES = 6
BATCH = 8
# Two epochs of as many batches; two of them are a window.
BATCHES = 22
EPOCHS = 2
CLIP = 0.05


class Net(L.LightningModule):
    """Two layers, whose matrices and biases have different optimisers.

    Args:
        kinds: The optimisers of the matrices and of the biases.
    """

    def __init__(self, kinds: str = "Muon and AdamW") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kinds = kinds
        self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2))
        self.double()

    def forward(self, features: Tensor) -> Tensor:
        return self.net(features)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def make_optimizers(self) -> tuple[list[Any], list[Any]]:
        """The optimisers, and for each a scheduler that steps after every step."""
        matrices = [parameter for parameter in self.parameters() if parameter.dim() == 2]
        biases = [parameter for parameter in self.parameters() if parameter.dim() == 1]
        optimizers: list[Any]
        if self.kinds == "Muon and AdamW":
            optimizers = [Muon(matrices, lr=0.02), AdamW(biases, lr=0.01)]
        else:
            optimizers = [SGD(matrices, lr=0.5, momentum=0.9), Adam(biases, lr=0.02)]
        return optimizers, [StepLR(optimizers[0], 4, 0.5), ExponentialLR(optimizers[1], 0.9)]

    def configure_optimizers(self) -> Any:
        optimizers, schedulers = self.make_optimizers()
        return optimizers, [{"scheduler": scheduler, "interval": "step"} for scheduler in schedulers]


def loader(processes: int = 1) -> DataLoader[Any]:
    torch.manual_seed(1)
    samples = torch.randn(BATCH * BATCHES, FEATURES, dtype=torch.float64)
    targets = samples[:, :2].sin()
    return DataLoader(TensorDataset(samples, targets), batch_size=BATCH // processes)


def by_hand(module: Net) -> Net:
    """The loop."""
    optimizers, schedulers = module.make_optimizers()
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    for _ in range(EPOCHS):
        for index, batch in enumerate(loader()):
            if index % 2 == 0:
                module.zero_grad()
            (module.training_step(batch, index) / 2).backward()
            if index % 2 == 0:
                continue
            nn.utils.clip_grad_norm_(parameters, CLIP)
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                scheduler.step()
    return module


def fit(module: Any, processes: int = 1, **options: Any) -> Any:
    trainer = quiet(max_epochs=EPOCHS, accumulate_grad_batches=2, gradient_clip_val=CLIP, **options)
    trainer.fit(module, loader(processes))
    return trainer


def weights(module: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(module.parameters()).detach()


KINDS = ["Muon and AdamW", "SGD and Adam"]


@pytest.mark.parametrize("kinds", KINDS)
def test_it_equals_a_loop_by_hand(kinds: str) -> None:
    module = Net(kinds)
    trainer = fit(module)
    assert trainer.global_step == EPOCHS * BATCHES // 2 >= 20
    torch.testing.assert_close(weights(module), weights(by_hand(Net(kinds))), rtol=0, atol=0)


STRATEGIES: dict[str, dict[str, Any]] = {
    "dp": {"strategy": "dp", "devices": ["cpu", "cpu"]},
    "balanced": {"strategy": "balanced", "devices": ["cpu", "cpu"]},
    "ddp": {"strategy": "ddp", "devices": 2, "processes": 2},
    "fsdp": {"strategy": "fsdp", "devices": 2, "processes": 2},
    "pipeline": {"strategy": "pipeline", "devices": ["cpu", "cpu"]},
    "pipeline in processes": {"strategy": PipelineStrategy(engine="processes"), "devices": ["cpu", "cpu"]},
    "hogwild": {"strategy": HogwildStrategy(processes=1)},
    "hogwild, shared": {"strategy": HogwildStrategy(processes=1, optimizer_state="shared")},
}


@pytest.mark.slow
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_it_equals_one_device_under_each_strategy(name: str, kinds: str) -> None:
    module = Net(kinds)
    trainer = fit(module, **STRATEGIES[name])
    assert trainer.global_step == EPOCHS * BATCHES // 2
    torch.testing.assert_close(weights(module), weights(by_hand(Net(kinds))), rtol=0, atol=1e-12)
