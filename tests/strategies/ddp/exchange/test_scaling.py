"""16-mixed in several processes: real float16 on the CPU, and one scale of the losses in all processes."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from equipoise import DDPStrategy
from tests.support.equality import assert_equal
from tests.support.pipelines import quiet

BATCH_SIZE = 4
# The batches of two processes, which draw samples in turn; the first process has the first of each pair.
BATCHES = [range(0, 8, 2), range(1, 8, 2), range(8, 16, 2), range(9, 16, 2)]


class Classifier(L.LightningModule):
    """Has no loss for batches without a positive value; large values have large losses. Notes the scale of losses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
        self.scales: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        if not (batch[0] > 0).any():
            return None
        # Small values have losses whose gradients float16 can hold at once.
        factor = 0.01 * batch[0].abs().amax()
        loss: Tensor = factor * self.net(batch[0]).square().mean()
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        assert self.trainer.scaler is not None
        self.scales.append(self.trainer.scaler.get_scale())

    def on_train_end(self) -> None:
        strategy = self.trainer.strategy
        self.scales_of_all = strategy.gather_objects(self.scales)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def values() -> Tensor:
    draw = torch.Generator().manual_seed(7)
    return torch.randn(16, 3, generator=draw)


def fit(strategy: Any, devices: int, loader: DataLoader[Any], **options: Any) -> Classifier:
    module = Classifier()
    trainer = quiet(strategy=strategy, devices=["cpu"] * devices, precision="16-mixed", max_epochs=2, **options)
    trainer.fit(module, loader)
    return module


def assert_trained_alike(data: Tensor, engine: Any, **options: Any) -> Classifier:
    """Train on one device and in two processes, and return the module of these."""
    dataset = TensorDataset(data)
    windows: DataLoader[Any] = DataLoader(dataset, batch_sampler=BATCHES)
    expected = fit("single_device", 1, windows, accumulate_grad_batches=2, **options)
    actual = fit(DDPStrategy(engine=engine), 2, DataLoader(dataset, BATCH_SIZE), **options)
    assert all(weight.isfinite().all() for weight in actual.parameters())
    assert_equal(expected, actual, 1e-4)
    for scales in actual.scales_of_all:
        assert scales == expected.scales[1::2]
    return actual


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("rank", "engine", "clip"), [(0, "torch", None), (0, "native", 0.05), (1, "native", None)])
def test_a_process_without_a_loss_in_its_first_window_scales_as_the_others(
    rank: int, engine: Any, clip: float | None
) -> None:
    """The first loss of a process would prepare the scaler."""
    data = values()
    data[BATCHES[rank]] = -1.0
    assert_trained_alike(data, engine, gradient_clip_val=clip)


@pytest.mark.parametrize("engine", ["torch", "native"])
def test_all_processes_skip_a_step_in_which_one_overflows(engine: Any) -> None:
    data = values()
    # Float16 has no value above 65,504.
    data[BATCHES[3]] = 1e3
    module = assert_trained_alike(data, engine)
    assert module.scales[1] < module.scales[0]
