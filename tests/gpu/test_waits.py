"""No step waits for a GPU unless the user asked for it: CUDA raises an error where the host would wait."""

from typing import Any

import pytest
import torch
from torch import Tensor

from equipoise import MemoryLogger, OOMRecovery, StepTimes
from equipoise.callbacks.progress.latest_values import LatestValues
from tests.gpu.runs import GPU, Classifier, fit, loader
from tests.gpu.waits import FIRST, STEPS, Logging, train

pytestmark = [
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
    pytest.mark.usefixtures("waits_allowed_again"),
]


# What differs is the step; the rest of the loop is the same.
OPTIONS: dict[str, dict[str, Any]] = {
    "accumulated": {"accumulate_grad_batches": 2},
    "clipped": {"gradient_clip_val": 0.1},
    "clipped by value": {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    "bfloat16": {"precision": "bf16-mixed"},
    "replicas, accumulated": {"strategy": "dp", "devices": [GPU, GPU], "accumulate_grad_batches": 2},
    "stages": {"strategy": "pipeline", "devices": [GPU, GPU]},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_steps_do_not_wait(name: str) -> None:
    assert train(**OPTIONS[name]).guarded == len(STEPS) - FIRST


@pytest.mark.parametrize("make", [lambda: MemoryLogger(every_n_steps=1, leaks=False), OOMRecovery, StepTimes])
def test_callbacks_do_not_wait(make: Any) -> None:
    assert train(callbacks=[make()]).guarded == len(STEPS) - FIRST


def test_captured_steps_do_not_wait() -> None:
    """After the trial, which is the third step."""
    assert train(Classifier, capture=True).guarded == len(STEPS) - FIRST


def test_a_fused_optimizer_does_not_wait_for_the_scaler() -> None:
    """Gradients that overflow are found by the kernel that would have applied them."""

    def fused(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01, fused=True)

    assert train(lambda: Logging(fused), precision="16-mixed").guarded == len(STEPS) - FIRST


def test_an_optimizer_that_the_trainer_fuses_does_not_wait() -> None:
    guard = train(precision="16-mixed", fused_optimizer=True, gradient_clip_val=0.1)
    assert guard.guarded == len(STEPS) - FIRST


class Waiting(Logging):
    """Reads its loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        assert torch.isfinite(loss)
        return loss


def test_a_wait_of_the_module_is_an_error() -> None:
    """A guard that sees nothing would let everything pass."""
    with pytest.raises(Exception, match="synchronizing CUDA operation"):
        train(Waiting)


# Values that are shown


@pytest.mark.not_simulated("no queue: they compute at once")
def test_a_busy_device_is_not_waited_for() -> None:
    values = LatestValues()
    stream = torch.cuda.current_stream()
    loss = torch.full((), 1.5, device="cuda")
    assert values.read({"loss": loss}, wait=True) == {"loss": 1.5}  # pinned memory is there from now on
    matrix = torch.randn(4096, 4096, device="cuda")
    for _ in range(200):
        matrix = (matrix @ matrix).clamp(-1, 1)
    loss = matrix[0, 0] * 0 + 2.5
    assert values.read({"loss": loss}) == {"loss": 1.5}
    assert not stream.query(), "reading waited for the device"
    stream.synchronize()
    assert values.read({"loss": loss + 1}) == {"loss": 2.5}


# Batches


@pytest.mark.parametrize("pinned", [False, True])
def test_batches_that_are_freed_early_arrive_whole(pinned: bool) -> None:
    """The host lets go of a batch when its copy has been started."""

    class Summing(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.sums: list[Tensor] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.sums.append(batch["features"].double().sum())
            return super().training_step(batch, batch_idx)

    sizes = [4096] * 20
    module, _, _ = fit(Summing, sizes=sizes, pinned=pinned, max_epochs=1)
    for expected, actual in zip(loader(sizes), module.sums, strict=True):
        torch.testing.assert_close(actual.cpu(), expected["features"].double().sum(), rtol=1e-10, atol=1e-8)
