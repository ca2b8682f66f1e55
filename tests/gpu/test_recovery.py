"""A step that really runs out of a GPU's memory is done again in micro-batches, with the same result."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from equipoise import OOMRecovery
from tests.gpu.runs import GPU, Classifier, fit
from tests.simulated.devices.installation import extension, is_installed
from tests.support.batches import CLASSES, FEATURES, TOKENS
from tests.support.one_device import assert_same_run

pytestmark = pytest.mark.filterwarnings(
    r"ignore:Batch \d+ of \d+ samples.* ran out of memory",
    "ignore:Measuring continues with at most",
    "ignore:cuda.0 .* ran out of memory and receives fewer samples from now on",
)

MIB = 2**20
# The allocator of a GPU takes memory in steps of 20 MiB, of which a limit must be many.
WIDTH, SAMPLES = (64, 512) if is_installed() else (256, 32768)
SIZES = [SAMPLES] * 4
SMALL = [16]
TOLERANCE = 1e-10


class Wide(Classifier):
    """Its activations need far more memory than its parameters and its optimiser."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(4)]
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(FEATURES * TOKENS, WIDTH), *layers, nn.Tanh(), nn.Linear(WIDTH, CLASSES)
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Adam needs memory of its own, and has changed something when it runs out.
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Limit(Callback):
    """Limits the device from the second step on, to what it holds and a part of what a step needs.

    Args:
        needed: Bytes that a step needs beside what the device holds; 0: they are measured, and nothing is limited.
    """

    def __init__(self, needed: int = 0) -> None:
        self.needed = needed

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 1 or trainer.current_epoch > 0:
            return
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(GPU)
        self.held = torch.cuda.memory_allocated(GPU)
        if self.needed:
            # Segments that cannot be used up for other sizes take memory, too.
            set_limit(torch.cuda.memory_reserved(GPU) + int(0.6 * self.needed))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and trainer.current_epoch == 0 and not self.needed:
            self.needed = torch.cuda.max_memory_allocated(GPU) - self.held


def set_limit(limit: int) -> None:
    """Limit the bytes of the GPU that this process may take; 0: no limit."""
    if is_installed():
        extension().set_limit(0, limit)
        return
    total = torch.cuda.get_device_properties(GPU).total_memory
    torch.cuda.set_per_process_memory_fraction(limit / total if limit else 1.0, GPU)


@pytest.fixture(autouse=True)
def without_limits() -> Iterator[None]:
    yield
    set_limit(0)
    gc.collect()
    torch.cuda.empty_cache()


def recovered(make: Any, **options: Any) -> OOMRecovery:
    """Train without and with a limit, and compare; return the callback."""
    fit(make, sizes=SMALL, **options)  # libraries take their workspaces
    measuring = Limit()
    expected = fit(make, sizes=SIZES, callbacks=[measuring], **options)
    recovery = OOMRecovery()
    actual = fit(make, sizes=SIZES, callbacks=[recovery, Limit(measuring.needed)], **options)
    assert_same_run(expected, actual, TOLERANCE)
    assert recovery.events
    assert {event.device for event in recovery.events} == {"cuda:0"}
    assert all(event.requested is not None and event.requested > 0 for event in recovery.events)
    return recovery


@pytest.mark.parametrize(
    ("strategy", "parts"), [("single_device", 1), ("dp", 2), ("balanced", 2), ("pipeline", 2)], ids=str
)
def test_a_step_is_done_again(strategy: str, parts: int) -> None:
    recovered(Wide, strategy=strategy, parts=parts)


class Repeating(torch.autograd.Function):
    """The identity, whose backward needs much memory."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.repeat(1, 1400)[:, : gradient.size(1)].clone()


class HeavyBackward(Wide):
    """Runs out of memory in its backward."""

    def forward(self, features: Tensor) -> Tensor:
        return Repeating.apply(self.net(features))


def test_a_backward_is_done_again() -> None:
    recovery = recovered(HeavyBackward)
    assert "backward" in {event.phase for event in recovery.events}


class Convolution(Wide):
    """Convolutions, whose algorithms need workspaces."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Unflatten(1, (1, TOKENS)),
            nn.Conv2d(1, 16, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(16 * TOKENS * FEATURES, CLASSES),
        )


@pytest.mark.parametrize("tries_algorithms", [False, True])
def test_convolutions_are_done_again(tries_algorithms: bool) -> None:
    """With `benchmark` cuDNN tries algorithms whose workspaces may not fit, either."""
    before = torch.backends.cudnn.benchmark
    try:
        recovered(Convolution, benchmark=tries_algorithms)
    finally:
        torch.backends.cudnn.benchmark = before
