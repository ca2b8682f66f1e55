"""Parts computed once more: nothing changes in the run, and what differs is named in all processes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from equipoise import VirtualDevicesStrategy
from equipoise.errors import StepError
from equipoise.extensions.virtual.part_batches import Part
from equipoise.extensions.virtual.verification import _packed, _unpacked
from tests.conftest import ignoring
from tests.extensions.virtual.test_faults import Averaging, Sparse
from tests.extensions.virtual.test_strategy import Augmented, Noisy, Skipping, assert_equal, on_one_device, run
from tests.support.trainer_runs import refuses

pytestmark = ignoring("The val loader shuffles")


class Counted(Noisy):
    """Metrics in a collection, attributes, a list and a hook of the backward; a batch that is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch[0].mul_(0.5)
        loss = super().training_step(batch, batch_idx)
        self.metrics.update(batch[0].sum(1, keepdim=True), batch[1])
        self.log("mse", self.metrics["MeanSquaredError"])
        self.steps += 1
        self.losses.append(loss.item())
        return loss

    def on_after_backward(self) -> None:
        self.log("norm", self.net[0].weight.grad.norm(), on_epoch=True)

    def on_train_batch_end(self, *arguments: Any) -> None:
        if self.trainer.world_size == 1:
            assert self.steps == len(self.losses) == 8 * (self.trainer.fit_loop.total_batch_idx + 1)


@pytest.mark.parametrize("kind", [Counted, Skipping, Averaging, Sparse])
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_nothing_changes(kind: type[Noisy], devices: int) -> None:
    options = {"accumulate_grad_batches": 3}
    assert_equal(run(kind, devices, verify=1, **options), on_one_device(kind, **options))
