"""The same weights to the bit on one GPU, in one process and in two that share it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise import Trainer, VirtualDevicesStrategy
from tests.gpu.runs import GPU, QUIET, Noisy, samples, weights
from tests.support.batches import TOKENS

pytestmark = pytest.mark.not_simulated("kernels of their own")


class Convolved(Noisy):
    """Statistics of a batch, dropout, convolutions, and a logged mean."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(TOKENS, TOKENS, 3, padding=1), *self.net)


def fit(processes: int, **options: Any) -> tuple[list[Tensor], dict[str, float]]:
    """Return the weights and the logged values of a run."""
    torch.manual_seed(5)
    module = Convolved()
    strategy = VirtualDevicesStrategy(count=4, backend="gloo")
    options = {"deterministic": True, "max_epochs": 2, **QUIET, **options}
    trainer = Trainer(strategy=strategy, devices=[GPU] * processes, **options)
    trainer.fit(module, samples(72, 16))
    return weights(module), {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.fixture(autouse=True)
def deterministic_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed"}, {"accumulate_grad_batches": 3}], ids=str)
def test_two_processes_equal_one_to_the_bit(options: dict[str, Any]) -> None:
    expected, expected_values = fit(1, **options)
    actual, values = fit(2, **options)
    for tensor, other in zip(expected, actual, strict=True):
        assert torch.equal(tensor, other)
    assert values == expected_values
