"""A device whose memory is really too small: the step is done again in smaller parts, and computes the same."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from equipoise import (
    BalancedDataParallelStrategy,
    DataParallelStrategy,
    OOMRecovery,
    PipelineStrategy,
    Strategy,
)
from tests.simulated.devices.installation import extension
from tests.simulated.devices.selection import on_the_host
from tests.support.batches import CLASSES, FEATURES, TOKENS
from tests.support.networks.transparency import Base
from tests.support.pipelines import fit

pytestmark = pytest.mark.filterwarnings(
    r"ignore:Batch \d of \d+ samples.* ran out of memory", "ignore:.* ran out of memory and receives fewer samples"
)


SIZES, WIDTH = [1024, 1024, 1024], 160


class Wide(Base):
    """Its activations need more memory than its parameters and its optimiser."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(6)]
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(FEATURES * TOKENS, WIDTH), *layers, nn.Tanh(), nn.Linear(WIDTH, CLASSES)
        )

    def forward(self, features: Tensor) -> Any:
        return self.net(features)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, foreach=False)


class Second(L.Callback):
    """Limits a device before the second step, to what it holds and a part of what the step needs.

    Args:
        device: Index of the device.
        needed: Bytes that the step needs beside what the device holds; 0: they are measured, and nothing is limited.
    """

    def __init__(self, device: int, needed: int = 0) -> None:
        self.device, self.needed = device, needed

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 1 or trainer.current_epoch > 0:
            return
        gc.collect()  # what a cycle holds would be free when memory runs out
        self.held = extension().allocated_bytes(self.device)
        extension().reset_peak(self.device)
        if self.needed:
            extension().set_limit(self.device, self.held + int(0.75 * self.needed))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and trainer.current_epoch == 0 and not self.needed:
            self.needed = extension().peak_bytes(self.device) - self.held


@pytest.fixture(autouse=True)
def without_limits() -> Iterator[None]:
    yield
    for index in range(extension().device_count()):
        extension().set_limit(index, 0)


STRATEGIES: dict[str, tuple[Callable[[], Strategy | str], list[str]]] = {
    "single_device": (lambda: "single_device", ["cuda:1"]),
    "dp": (DataParallelStrategy, ["cuda:1", "cuda:0"]),
    "dp forward": (lambda: DataParallelStrategy(parallelize="forward"), ["cuda:0", "cuda:1"]),
    "dp on one device": (DataParallelStrategy, ["cuda:1", "cuda:1"]),
    "balanced": (lambda: BalancedDataParallelStrategy(shares=[1, 1]), ["cuda:0", "cuda:1"]),
    "pipeline": (lambda: PipelineStrategy(micro_batches=2, cut_before=["net.4"]), ["cuda:0", "cuda:1"]),
    "pipeline on one device": (lambda: PipelineStrategy(micro_batches=2, cut_before=["net.4"]), ["cuda:1", "cuda:1"]),
}
CASES = [(name, int(device[-1])) for name, (_, devices) in STRATEGIES.items() for device in sorted(set(devices))]


@pytest.mark.parametrize(("name", "device"), CASES)
def test_a_step_is_done_again_where_memory_runs_out(name: str, device: int) -> None:
    make, devices = STRATEGIES[name]

    def train(used: list[str], *callbacks: L.Callback) -> Any:
        options = {"accelerator": "auto", "strategy": make(), "devices": used, "callbacks": list(callbacks)}
        module, _, _ = fit(Wide, SIZES, reads_gradients=False, **options)
        return module

    with on_the_host():
        expected = train(["cpu"] * len(devices))
    unlimited = Second(device)
    train(devices, unlimited)
    recovery = OOMRecovery()
    module = train(devices, recovery, Second(device, unlimited.needed))
    assert {event.device for event in recovery.events} == {f"cuda:{device}"}
    for (name, value), other in zip(expected.named_parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(other.cpu(), value, rtol=1e-12, atol=1e-12, msg=name)
