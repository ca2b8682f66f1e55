"""Gradients by hand beside a scaler: each has its own size, whichever backward it comes from."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.utils.data import DataLoader

from equipoise import DDPStrategy, StepError
from tests.support.pairs import pairwise
from tests.support.trainer_runs import trainer


class Two(L.LightningModule):
    """Two parameters with an optimiser each. The gradients of a batch are its mean, and three times that."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        self.make = make

    def losses(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        return (self.first * batch).sum(1).mean(), 3 * (self.second * batch).sum(1).mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        one, two = self.optimizers()
        one.zero_grad()
        two.zero_grad()
        self.gradients(*self.losses(batch))
        one.step()
        two.step()

    def gradients(self, one: Tensor, two: Tensor) -> None:
        """Compute the gradients of a step."""

    def configure_optimizers(self) -> Any:
        return self.make([self.first], lr=0.5), self.make([self.second], lr=0.5)


def plain_second(self: Two, one: Tensor, two: Tensor) -> None:
    self.manual_backward(one)
    two.backward()


def assigned(self: Two, one: Tensor, two: Tensor) -> None:
    self.manual_backward(one)
    self.second.grad = grad(two, self.second)[0]


def changed(self: Two, one: Tensor, two: Tensor) -> None:
    """Gradients computed from scaled ones are scaled."""
    self.manual_backward((one + two) / 2)
    self.first.grad = self.first.grad * 2
    self.second.grad.mul_(2)


def by_the_scaler(self: Two, one: Tensor, two: Tensor) -> None:
    self.trainer.scaler.scale(one + two).backward()


def parts(self: Two, one: Tensor, two: Tensor) -> None:
    """Plain gradients in parts, with zeros in place of none."""
    self.manual_backward(one)
    (two / 2).backward(retain_graph=True)
    (two / 2).backward()
    self.clip_gradients(self.optimizers()[1], 100.0, "norm")


def fused(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, fused=True)


RIGHT = [plain_second, assigned, changed, by_the_scaler, parts]
DATA = torch.arange(16.0).view(8, 2)


CASES = pairwise(RIGHT, [torch.optim.SGD, fused], [1, 2])


@pytest.mark.few_cases(3)
@pytest.mark.parametrize(("step", "make", "processes"), CASES)
def test_scaled_and_plain_gradients_are_unscaled_each_by_its_own(step: Any, make: Any, processes: int) -> None:
    module = type(step.__name__, (Two,), {"gradients": step})(make)
    strategy = "single_device" if processes == 1 else DDPStrategy()
    run = trainer(precision="16-mixed", strategy=strategy, devices=processes, max_epochs=1)
    run.fit(module, DataLoader(DATA, batch_size=4 // processes))
    expected = -0.5 * (DATA[:4].mean(0) + DATA[4:].mean(0))
    assert torch.equal(module.first.detach(), expected)
    assert torch.equal(module.second.detach(), 3 * expected)


def both_in_one(self: Two, one: Tensor, two: Tensor) -> None:
    self.manual_backward(one + two)
    two.detach_().requires_grad_()
    self.second.sum().backward()


def one_optimizer(self: Two, one: Tensor, two: Tensor) -> None:
    self.manual_backward(one)
    two.backward()
    self.optimizers()[0].optimizer.add_param_group({"params": [self.second]})


@pytest.mark.parametrize("step", [both_in_one, one_optimizer], ids=lambda step: step.__name__)
def test_two_sizes_of_one_optimiser_are_refused(step: Any) -> None:
    module = type(step.__name__, (Two,), {"gradients": step})()
    with pytest.raises(StepError, match=r"Gradients of one optimiser come from.*`self.manual_backward\(loss\)`"):
        trainer(precision="16-mixed", max_epochs=1).fit(module, DataLoader(DATA, batch_size=4))


def test_an_overflow_skips_scaled_steps_alone() -> None:
    class Overflows(Two):
        def gradients(self, one: Tensor, two: Tensor) -> None:
            self.manual_backward(one * float("inf"))
            two.backward()

    module = Overflows()
    run = trainer(precision="16-mixed", max_steps=2, max_epochs=1)
    run.fit(module, DataLoader(DATA, batch_size=4))
    assert torch.equal(module.first.detach(), torch.zeros(2))
    assert torch.equal(module.second.detach(), -1.5 * DATA[:4].mean(0))
    assert run.scaler is not None
    assert run.scaler.get_scale() == 2.0**15
