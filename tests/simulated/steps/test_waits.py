"""Steps do not wait for a device: the host only tells it what to do next.

All from the end of one batch to the end of the next counts, the copy of the batch included: batches lie in pinned
memory, from which a copy does not wait.
"""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from equipoise import (
    BalancedDataParallelStrategy,
    DataParallelStrategy,
    MemoryLogger,
    OOMRecovery,
    PipelineStrategy,
    ProgressBar,
    Strategy,
)
from tests.simulated.devices.installation import extension
from tests.support.batches import Batches
from tests.support.networks.transparency import Mlp
from tests.support.pipelines import quiet

SIZES = [13] * 4
EPOCHS = 2


# Modules


class Logging(Mlp):
    """Logs its loss, and a number."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.log("logged", output["loss"] if isinstance(output, dict) else output, prog_bar=True, on_epoch=True)
        self.log("number", float(batch_idx), on_epoch=True)
        return output


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


class Reasons(L.Callback):
    """Notes for which reasons the host waits, from the end of one batch to that of the next."""

    def __init__(self) -> None:
        self.of_steps: list[list[str]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            # What an epoch begins with belongs to no step.
            extension().take_reasons()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.of_steps.append(extension().take_reasons())


def reasons_of(
    make: Callable[[], L.LightningModule], strategy: Strategy | str, devices: list[str], **options: Any
) -> list[list[str]]:
    """Return the reasons to wait in each step of two epochs."""
    torch.manual_seed(1)
    reasons = Reasons()
    callbacks = [*options.pop("callbacks", []), reasons]
    trainer = quiet(
        **{
            "accelerator": "cuda",
            "strategy": strategy,
            "devices": devices,
            "max_epochs": EPOCHS,
            "callbacks": callbacks,
            "precision": "32-true",
            **options,
        }
    )
    trainer.fit(make(), DataLoader(Batches(SIZES), batch_size=None, pin_memory=True))
    assert len(reasons.of_steps) == EPOCHS * len(SIZES)
    return reasons.of_steps


STRATEGIES: dict[str, tuple[Callable[[], Strategy | str], list[str]]] = {
    "single_device": (lambda: "single_device", ["cuda:1"]),
    "dp": (DataParallelStrategy, ["cuda:0", "cuda:1"]),
    "dp forward": (lambda: DataParallelStrategy(parallelize="forward"), ["cuda:0", "cuda:1"]),
    "dp on one device": (DataParallelStrategy, ["cuda:1", "cuda:1"]),
    "balanced": (lambda: BalancedDataParallelStrategy(shares=[2, 1]), ["cuda:1", "cuda:0"]),
    "pipeline": (lambda: PipelineStrategy(micro_batches=2), ["cuda:0", "cuda:1"]),
    "pipeline on one device": (lambda: PipelineStrategy(micro_batches=2), ["cuda:1", "cuda:1"]),
    "pipeline with several stages on a device": (
        lambda: PipelineStrategy(micro_batches=2, schedule="interleaved_zero_bubble", stages_per_device=2),
        ["cuda:0", "cuda:1"],
    ),
}

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
    "bf16-true": lambda: {"precision": "bf16-true"},
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
