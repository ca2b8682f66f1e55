"""Steps by hand that pass the trainer by: the counter stands, and one warning says what to write instead."""

import re
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from tests.support.trainer_runs import Small, loader, trainer

MESSAGE = r"no optimiser step was counted: `global_step` stands still.* call `self\.optimizers\(\)\.step\(\)`"


class ByHand(Small):
    """Steps in one of several ways.

    Args:
        way: "counted", "raw", "kept", "returned and kept", "never", or "late": counted after two epochs.
    """

    def __init__(self, way: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.way = way
        self.kept = torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_optimizers(self) -> Any:
        return None if self.way == "kept" else self.kept

    def optimizer(self) -> Any:
        if self.way == "raw":
            return self.optimizers().optimizer
        if "kept" in self.way:
            return self.kept
        return self.optimizers()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        if self.way == "never" or (self.way == "late" and self.current_epoch < 2):
            return
        self.optimizer().step()
        self.optimizer().zero_grad()


def told(way: str, **options: Any) -> tuple[list[str], int]:
    """Return the warnings of a fit of three epochs, and the steps that it has counted."""
    run = trainer(max_epochs=3, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(ByHand(way), loader(4))
    messages = [str(warning.message) for warning in caught]
    return [message for message in messages if "returned None" not in message], run.global_step


@pytest.mark.parametrize("way", ["raw", "kept", "returned and kept"])
def test_steps_that_are_not_counted_are_reported_once(way: str) -> None:
    (message,), steps = told(way)
    assert re.search(MESSAGE, message)
    assert steps == 0


@pytest.mark.parametrize(("way", "steps"), [("counted", 12), ("never", 0), ("late", 4)])
def test_nothing_is_said_where_steps_count_or_none_is_taken(way: str, steps: int) -> None:
    assert told(way) == ([], steps)


class MovesWeights(Callback):
    """Swaps weights at the ends of epochs, as averages do."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        with torch.no_grad():
            pl_module.layer.weight.mul_(2)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        with torch.no_grad():
            pl_module.layer.weight.mul_(0.5)


def test_weights_that_change_between_epochs_are_no_steps() -> None:
    assert told("never", callbacks=[MovesWeights()]) == ([], 0)
