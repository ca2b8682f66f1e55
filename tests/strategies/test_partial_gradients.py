"""Losses that a step computes from gradients of its own: of the whole batch, or refused."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from equipoise import DDPStrategy, StepError, VirtualDevicesStrategy
from tests.support.equality import assert_equal
from tests.support.pipelines import quiet


class Tasks(L.LightningModule):
    """Divides the losses of two tasks by the norms of their gradients, also in its evaluation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()

    def losses(self, batch: Any) -> torch.Tensor:
        return (self.net(batch[0]) - batch[1]).square().mean(0)

    def balanced(self, batch: Any) -> torch.Tensor:
        losses = self.losses(batch)
        gradients = [torch.autograd.grad(loss, self.net[0].weight, retain_graph=True)[0] for loss in losses]
        return sum(loss / gradient.norm() for loss, gradient in zip(losses, gradients, strict=True))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.balanced(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            self.balanced([tensor.clone() for tensor in batch])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Accumulated(Tasks):
    """Takes the norms from `.grad`."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = self.losses(batch)
        losses[0].backward(retain_graph=True, inputs=[self.net[0].weight])
        return losses.sum() / self.net[0].weight.grad.norm()


class OfInputs(Tasks):
    """Takes gradients of inputs, and of a function of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features = batch[0].clone().requires_grad_()
        (slopes,) = torch.autograd.grad(self.net(features).sum(), features, create_graph=True)
        torch.func.grad(lambda weight: (batch[0] @ weight.T).square().mean())(self.net[0].weight)
        return self.losses(batch).sum() + slopes.square().sum(1).mean()


def weights(kind: type[Tasks], strategy: Any = "single_device", devices: int = 1) -> list[torch.Tensor]:
    module = kind()
    draw = torch.Generator().manual_seed(5)
    data = TensorDataset(*(torch.randn(12, size, generator=draw, dtype=torch.float64) for size in (4, 2)))
    size = 6 // devices if isinstance(strategy, DDPStrategy) else 6
    trainer = quiet(strategy=strategy, devices=["cpu"] * devices, inference_mode=False)
    trainer.fit(module, DataLoader(data, batch_size=size), DataLoader(data, batch_size=6))
    return [parameter.detach() for parameter in module.parameters()]


STRATEGIES = [
    *(DDPStrategy(engine=engine) for engine in ("torch", "native")),
    *(VirtualDevicesStrategy(count=2), "dp", "balanced"),
]


@pytest.mark.quick_cases(4)
@pytest.mark.thorough
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: getattr(strategy, "name", strategy))
def test_gradients_of_a_part_of_the_batch_are_refused_in_a_step(strategy: Any) -> None:
    for kind in (Tasks, Accumulated):
        with pytest.raises(StepError, match="was asked for gradients of parameters"):
            weights(kind, strategy, 2)
    assert_equal(weights(OfInputs), weights(OfInputs, strategy, 2), 1e-12)
