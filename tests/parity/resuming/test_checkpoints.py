"""Further uses of a checkpoint: loaders without position, random draws, evaluation, modules without a trainer."""

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.equality import assert_equal

from .. import data
from ..harness import Case
from ..modules import Classifier, with_optimizers
from ..resumption import (
    FINAL,
    TRAINERS,
    WHOLE,
    StatefulData,
    assert_same_parts,
    by_step,
    every_epoch,
    every_two_steps,
    resume,
    run,
    scenario,
)


@pytest.mark.thorough
def test_a_plain_loader_resumes_within_an_epoch(tmp_path: Path) -> None:
    """The loader cannot tell its position; Lightning would begin the epoch's data anew."""
    plan = scenario("mid-epoch", "step=2.ckpt", callbacks=every_two_steps, module=with_optimizers(by_step))
    saving = {saver: run(plan.case, saver, tmp_path / saver) for saver in TRAINERS}
    for saver in TRAINERS:
        for checkpoint in ("step=2.ckpt", "step=8.ckpt"):
            plan = dataclasses.replace(plan, checkpoint=checkpoint)
            actual = resume(plan, tmp_path / saver, "equipoise", tmp_path / f"{saver}-{checkpoint}")
            assert_same_parts(FINAL, saving["lightning"], actual, f"{checkpoint} of {saver}")


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


class Drawing(Classifier):
    """Draws in every step, by dropout and by hand."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5, batch_norm=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step([batch[0] + 0.1 * torch.randn(1), batch[1]], batch_idx)


def augmented() -> dict[str, Any]:
    return {
        "train_dataloaders": DataLoader(data.Noisy(6, 1), data.BATCH, shuffle=True),
        "val_dataloaders": data.loader(2),
    }


@pytest.mark.quick_cases(2)
@pytest.mark.thorough
@pytest.mark.parametrize("loaders", [data.shuffled, augmented, data.unsized])
def test_random_numbers_resume_within_an_epoch(loaders: Any, tmp_path: Path) -> None:
    """Shuffling, augmentation, dropout: Lightning's checkpoints keep no generator, ours do."""
    plan = scenario("drawing", "step=2.ckpt", callbacks=every_two_steps, module=Drawing, data=loaders)
    expected = run(plan.case, "lightning", tmp_path / "uninterrupted")
    run(plan.case, "equipoise", tmp_path / "saved")
    for checkpoint in ("step=6.ckpt", "step=10.ckpt"):
        plan = dataclasses.replace(plan, checkpoint=checkpoint)
        actual = resume(plan, tmp_path / "saved", "equipoise", tmp_path / checkpoint)
        assert_same_parts(WHOLE, expected, actual, checkpoint)
