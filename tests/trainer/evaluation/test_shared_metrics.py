"""One metric that training and validation log has a value of each."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricCollection, SumMetric

from tests.support.resumption import assert_resumes
from tests.support.trainer_runs import Small, trainer

pytestmark = pytest.mark.filterwarnings("ignore:The ``compute`` method of metric (Mean|Sum)Metric")

TRAIN, VAL = torch.arange(4.0)[:, None].repeat(1, 2), torch.arange(10.0, 13.0)[:, None].repeat(1, 2)


class Shares(Small):
    def __init__(self) -> None:
        super().__init__()
        self.both = MetricCollection([MeanMetric(), SumMetric()])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.validation_step(batch, batch_idx)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.both.update(batch)
        self.log_dict(self.both, on_step=False, on_epoch=True)


class Values(Callback):
    """Notes the values at the ends of validations and of epochs."""

    def __init__(self) -> None:
        self.values: list[dict[str, float]] = []

    def note(self, trainer: Any, pl_module: Any) -> None:
        values = {name: value.item() for name, value in trainer.callback_metrics.items()}
        self.values.append({name: value for name, value in values.items() if name != "loss"})

    on_validation_end = note
    on_train_epoch_end = note


def fit(module: Any, *callbacks: Any, path: Path | None = None, **options: Any) -> list[dict[str, float]]:
    values = Values()
    defaults = {"num_sanity_val_steps": 1, "max_epochs": 2}
    run = trainer(**{**defaults, **options}, callbacks=[values, *callbacks])
    run.fit(module, DataLoader(TRAIN), DataLoader(VAL), ckpt_path=path)
    return values.values[1:] if run.num_sanity_val_steps else values.values


IN_TRAINING, IN_VALIDATION = {"MeanMetric": 1.5, "SumMetric": 12.0}, {"MeanMetric": 11.0, "SumMetric": 66.0}


@pytest.mark.parametrize("interval", [1.0, 2])
def test_a_metric_that_training_and_validation_log_has_a_value_of_each(interval: Any) -> None:
    validations = [IN_VALIDATION] * (1 if interval == 1.0 else 2)
    assert fit(Shares(), val_check_interval=interval) == [*validations, IN_TRAINING] * 2


def test_without_a_sanity_check_the_first_validation_warns() -> None:
    with pytest.warns(UserWarning, match=r"log the same metric, here as 'MeanMetric': .* Give each"):
        values = fit(Shares(), num_sanity_val_steps=0)
    assert values[-2:] == [IN_VALIDATION, IN_TRAINING]


def test_a_run_that_is_resumed_from_a_validation_goes_on_with_both(tmp_path: Path) -> None:
    def run(callbacks: list[Any], path: Path | None) -> list[dict[str, float]]:
        # The list of values is restored, and continues.
        return fit(Shares(), *callbacks, path=path, val_check_interval=2, max_epochs=1)

    assert_resumes(run, tmp_path, ["on_validation_end"])
