"""Further uses of a checkpoint: evaluation, and modules without a trainer."""

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.equality import assert_equal

from ..harness import Case
from ..modules import Classifier
from ..resumption import (
    TRAINERS,
    StatefulData,
    every_epoch,
    run,
)


@pytest.mark.parametrize("saver", TRAINERS)
def test_each_trainer_evaluates_the_others_checkpoint(saver: str, tmp_path: Path) -> None:
    case = Case(name="saved", callbacks=every_epoch())
    run(case, saver, tmp_path / "saved")
    path = tmp_path / "saved" / "kept" / "epoch=1.ckpt"
    for entry in ("validate", "test", "predict"):

        def evaluate(trainer: Any, module: Any, given: Any, entry: str = entry) -> Any:
            return getattr(trainer, entry)(module, given["val_dataloaders"], ckpt_path=path)

        evaluation = dataclasses.replace(case, run=evaluate)
        theirs, ours = (run(evaluation, name, tmp_path / f"{name}-{entry}") for name in TRAINERS)
        # Its values stand at the step of the checkpoint in ours.
        assert_equal(theirs, ours, title=f"{entry} of a checkpoint of {saver}", ignore=["metrics.csv"])


class Sized(Classifier):
    """Takes arguments, which a checkpoint must bring back."""

    def __init__(self, width: int, rates: Any = (0.1, 0.2), **more: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.extra = torch.nn.Linear(width, width)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_load_from_checkpoint_loads_the_checkpoint_of_either_trainer(trainer: str, tmp_path: Path) -> None:
    case = Case(
        name="sized",
        module=lambda: Sized(5, rates=[0.3], colour="red"),
        data=lambda: {"datamodule": StatefulData(4)},
        callbacks=every_epoch(),
    )
    record = run(case, trainer, tmp_path / "saved")
    path = tmp_path / "saved" / "kept" / "epoch=1.ckpt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = Sized.load_from_checkpoint(path)
        dataset = StatefulData.load_from_checkpoint(path)
    assert_equal(
        record["weights"],
        {name: value.detach().clone() for name, value in module.state_dict().items()},
        title="weights",
    )
    assert {name: module.hparams[name] for name in ("width", "rates", "colour")} == {
        "width": 5,
        "rates": [0.3],
        "colour": "red",
    }
    assert dataset.hparams.batches == 4
