"""A run on two simulated CUDA devices, resumed in the midst of an epoch or of a window, ends as one without a break."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torchmetrics import MeanMetric

from equipoise import BalancedDataParallelStrategy, DataParallelStrategy, PipelineStrategy, Strategy
from tests.simulated.configurations.fitting import (
    Configuration,
    Logging,
    Result,
    assert_same_result,
    fit_on_devices,
    fit_on_the_host,
)
from tests.simulated.configurations.saving import Saving
from tests.support.batches import CLASSES, FEATURES, TOKENS

# The batches of a window; an epoch has five. Each part of a batch has several samples, as batch statistics need.
WINDOW = 2
SIZES = (12, 12, 8, 12, 6)
# The index of the batch after which the run is resumed.
PLACES = {"between windows": 1, "within a window": 2}

STRATEGIES: dict[str, Callable[[], Strategy | str]] = {
    "single_device": lambda: "single_device",
    "dp": DataParallelStrategy,
    "dp forward": lambda: DataParallelStrategy(parallelize="forward"),
    "balanced": lambda: BalancedDataParallelStrategy(shares=[1, 2]),
    "pipeline": lambda: PipelineStrategy(micro_batches=2, cut_before=["net.4"]),
}


class Measured(Logging):
    """Batch statistics, and a metric whose state outlives a step."""

    dropped = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Flatten(),
            nn.Linear(TOKENS * FEATURES, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(self.dropped),
            nn.Linear(8, 8),
            nn.Tanh(),
            nn.Linear(8, CLASSES),
        )
        self.mean = MeanMetric()

    def forward(self, features: Tensor) -> Any:
        return self.net(features)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.mean.update(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss


class Dropping(Measured):
    """The same with dropout, whose masks come from the generators of the devices."""

    dropped = 0.3


def interrupted_and_resumed(configuration: Configuration, batch: int, folder: Path) -> tuple[Result, Result]:
    """Return the run that saved a checkpoint after a batch and continued, and the run that continues with the file."""
    path = folder / "saved.ckpt"
    whole = fit_on_devices(configuration, [Saving(path, batch)])
    return whole, fit_on_devices(configuration, ckpt_path=path)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_resumed_run_ends_as_one_without_a_break(strategy: str, place: str, tmp_path: Path) -> None:
    devices = ("cuda:1",) if strategy == "single_device" else ("cuda:1", "cuda:0")
    options = {"accumulate_grad_batches": WINDOW}
    configuration = Configuration(strategy, STRATEGIES[strategy], devices, Dropping, options, SIZES)
    whole, resumed = interrupted_and_resumed(configuration, PLACES[place], tmp_path)
    assert_same_result(whole, resumed, 0.0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_resumed_run_computes_what_the_host_computes(strategy: str, tmp_path: Path) -> None:
    devices = ("cuda:1",) if strategy == "single_device" else ("cuda:1", "cuda:0")
    options = {"accumulate_grad_batches": WINDOW}
    configuration = Configuration(strategy, STRATEGIES[strategy], devices, Measured, options, SIZES)
    _, resumed = interrupted_and_resumed(configuration, PLACES["within a window"], tmp_path)
    assert_same_result(fit_on_the_host(configuration), resumed, 1e-12)
