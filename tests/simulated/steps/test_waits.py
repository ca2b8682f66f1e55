"""Steps do not wait for a device: the host only tells it what to do next.

All from the end of one batch to the end of the next counts, the copy of the batch included: batches lie in pinned
memory, from which a copy does not wait.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from equipoise import (
    BalancedDataParallelStrategy,
    MemoryLogger,
    OOMRecovery,
    ProgressBar,
)
from tests.simulated.steps.waits import STRATEGIES, Logging, reasons_of
from tests.support.networks.transparency import Mlp

# Modules


class Waiting(Mlp):
    """Reads its loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        loss = output["loss"] if isinstance(output, dict) else output
        assert torch.isfinite(loss)
        return output


class Dropping(Logging):
    """Logs, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net.append(nn.Dropout(0.1))


# Fits


# Functions, because a callback belongs to one run.
OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "clipping": lambda: {"gradient_clip_val": 0.1},
    "clipping by value": lambda: {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    "accumulation": lambda: {"accumulate_grad_batches": 2},
    "armed recovery": lambda: {"callbacks": [OOMRecovery()]},
    "memory of every step": lambda: {"callbacks": [MemoryLogger(every_n_steps=1)]},
    "progress bar": lambda: {"callbacks": [ProgressBar()], "enable_progress_bar": True},
    "bf16-mixed": lambda: {"precision": "bf16-mixed"},
}

# Steps in which there is more to do: replicas are made, a network is cut, shares are measured.
FIRST_STEPS = 1


# Tests


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_steps_do_not_wait(strategy: str, options: str) -> None:
    make, devices = STRATEGIES[strategy]
    assert reasons_of(Dropping, make(), devices, **OPTIONS[options]())[FIRST_STEPS:] == [[]] * 7


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_float16_waits_for_the_scaler_alone(strategy: str) -> None:
    """Torch's scaler reads whether gradients are finite, on each device that has some: several have with a pipeline."""
    make, devices = STRATEGIES[strategy]
    count = len(set(devices)) if strategy.startswith("pipeline") else 1
    reasons = reasons_of(Logging, make(), devices, precision="16-mixed")
    assert reasons[FIRST_STEPS:] == [["aten::_local_scalar_dense"] * count] * 7


def test_measured_shares_wait_while_they_are_measured() -> None:
    strategy = BalancedDataParallelStrategy(shares="auto")
    reasons = reasons_of(Logging, strategy, ["cuda:0", "cuda:1"])
    assert "torch.cuda.synchronize" in reasons[0]
    assert reasons[-1] == []


def test_waits_of_the_module_are_seen() -> None:
    assert reasons_of(Waiting, "single_device", ["cuda:0"]) == [["aten::_local_scalar_dense"]] * 8
