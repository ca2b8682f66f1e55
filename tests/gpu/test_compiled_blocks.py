"""Compiled blocks compute on a GPU what eager ones compute. Not run on two GPUs yet."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise import Trainer
from equipoise.extensions.compiled.interop.compiling import why_not_compiled
from equipoise.extensions.compiled.interop.features import COMPILE_BLOCKS
from tests.gpu.runs import GPU, QUIET, Classifier, fit, loader, weights

# A warning, which is an error here, would say that a block stays eager.
pytestmark = [
    pytest.mark.not_simulated("no compiler"),
    pytest.mark.slow,
    pytest.mark.skipif(why_not_compiled(COMPILE_BLOCKS) is not None, reason="torch cannot compile a block"),
]

# Kernels of the compiler round otherwise than torch's own.
TOLERANCES = {"64-true": 1e-10, "32-true": 1e-3, "bf16-mixed": 5e-2}


class Block(nn.Module):
    """A residual block of layers that the compiler joins."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))


class Deep(Classifier):
    """Three like blocks."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer] | None = None) -> None:
        super().__init__(optimizer or descent)
        self.net = nn.Sequential(*self.net[:3], Block(), Block(), Block(), *self.net[3:])


def descent(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@pytest.mark.parametrize(
    ("strategy", "parts", "precision"),
    [
        ("single_device", 1, "64-true"),
        ("single_device", 1, "32-true"),
        ("single_device", 1, "bf16-mixed"),
        ("dp", 2, "64-true"),
        ("pipeline", 2, "64-true"),
    ],
)
def test_equal_to_eager_blocks(strategy: str, parts: int, precision: str) -> None:
    results = []
    for compiled in (False, {"dynamic": None}):
        module, _, trainer = fit(Deep, strategy=strategy, parts=parts, precision=precision, compile=compiled)
        results.append(weights(module))
    assert trainer.run_state.summary_rows["compiled blocks"].startswith("3, by ")
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=TOLERANCES[precision])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_gpus_equal_eager_ones(strategy: str) -> None:
    results = []
    for compiled in (False, True):
        torch.manual_seed(7)
        module = Deep()
        devices = [GPU, torch.device("cuda", 1)]
        options: Any = {**QUIET, "max_epochs": 2, "precision": "64-true"}
        trainer = Trainer(strategy=strategy, devices=devices, compile=compiled, **options)
        trainer.fit(module, loader([8] * 4))
        results.append(weights(module))
    assert trainer.run_state.summary_rows["compiled blocks"].startswith("3, by ")
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=TOLERANCES["64-true"])
