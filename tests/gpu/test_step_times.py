"""The clock of a fit reads a GPU's times by events, without waiting for it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from equipoise import StepTimes, Trainer
from equipoise.extensions.timing.device_times import DeviceTimes
from equipoise.extensions.timing.parts import COMPUTATION, FORWARD
from tests.gpu.runs import GPU, QUIET, Classifier, loader

pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")

STEPS = 300


class Heavy(Classifier):
    """A step whose forward takes a GPU long."""

    matrix: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("matrix", torch.randn(2048, 2048) / 50)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        product = self.matrix
        for _ in range(4):
            product = product @ self.matrix
        return super().training_step(batch, batch_idx) + 0.0 * product.sum()


@pytest.mark.not_simulated("no queue: they compute at once")
def test_the_time_of_the_forward_is_found() -> None:
    times = StepTimes()
    trainer = Trainer(devices=[GPU], max_epochs=1, callbacks=[times], **QUIET)
    trainer.fit(Heavy(), loader([8] * STEPS))
    assert times.times is not None
    shares = times.times.shares()
    assert shares.get(FORWARD, 0.0) + shares.get(COMPUTATION, 0.0) > 0.5


@pytest.mark.not_simulated("no queue: they compute at once")
def test_events_that_the_device_has_not_passed_are_not_awaited() -> None:
    device_times = DeviceTimes()
    matrix = torch.randn(4096, 4096, device="cuda")
    for _ in range(47):
        device_times.begin_step()
    for _ in range(200):
        matrix = (matrix @ matrix).clamp(-1, 1)
    device_times.begin_step()
    assert not device_times.read()
    torch.cuda.synchronize()
    assert device_times.read()
