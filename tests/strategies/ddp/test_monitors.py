"""Callbacks that monitor a value which differs between processes: a resumed run decides as an undisturbed one."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor

from equipoise import Trainer
from tests.support.trainer_runs import Small, loader
from tests.support.trainer_runs import trainer as quiet

# Values of each rank, by steps. At step 4 rank 0 alone has a better one than before.
VALUES = ((4.0, 3.0, 2.0, 1.0, 1.5, 1.2), (1.0, 0.5, 0.8, 0.9, 0.4, 0.7))


def trainer(**options: Any) -> Trainer:
    return quiet(
        strategy="ddp_spawn", devices=["cpu", "cpu"], limit_train_batches=2, enable_checkpointing=True, **options
    )


class Differs(Small):
    """Logs a value of each process."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("value", VALUES[self.global_rank][self.global_step])
        return self.loss(batch)


def fit(folder: Path, steps: int, ckpt_path: Path | None = None) -> dict[str, Any]:
    """Train, and return what the callbacks decided."""
    keeper = ModelCheckpoint(folder, monitor="value", every_n_train_steps=1, save_top_k=2, filename="{step}")
    copies = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, filename="at-{step}")
    stopper = EarlyStopping("value", patience=4, check_on_train_epoch_end=True)
    run = trainer(callbacks=[keeper, copies, stopper], max_steps=steps, max_epochs=-1)
    run.fit(Differs(), loader(4, 1), ckpt_path=ckpt_path)
    assert keeper.best_model_score is not None
    best = {Path(path).name: value.item() for path, value in keeper.best_k_models.items()}
    return {"score": keeper.best_model_score.item(), "best": best, "steps": run.global_step}


@pytest.mark.thorough
def test_a_resumed_run_monitors_a_value_that_differs_between_processes_as_an_undisturbed_one(tmp_path: Path) -> None:
    expected = fit(tmp_path / "whole", 6)
    assert expected["score"] > min(VALUES[0]), "the processes agree on every value"
    fit(tmp_path / "parts", 4)
    assert fit(tmp_path / "parts", 6, tmp_path / "parts" / "at-step=4.ckpt") == expected


class LogsInTheMainProcess(Small):
    """Each hook logs a value in rank 0 alone: that of the second epoch is the best."""

    def log_alone(self, name: str, *, flagged: bool = True) -> None:
        if self.trainer.is_global_zero:
            self.log(name, (3.0, 1.0, 2.0, 0.0)[self.current_epoch], rank_zero_only=flagged)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log_alone("step")
        return self.loss(batch)

    def on_train_epoch_end(self) -> None:
        self.log_alone("train end")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log_alone("val")

    def on_validation_epoch_end(self) -> None:
        self.log_alone("val end")
        self.log_alone("val end without a flag", flagged=False)


NAMES = ("step", "train end", "val", "val end", "val end without a flag")


@pytest.mark.thorough
def test_a_value_that_rank_0_alone_logs_is_monitored(tmp_path: Path) -> None:
    keepers: list[Any] = [ModelCheckpoint(tmp_path / name, "{epoch}", monitor=name) for name in NAMES]
    keepers.append(ModelCheckpoint(tmp_path / "steps", "{step}", monitor="step", every_n_train_steps=1))
    run = trainer(callbacks=[*keepers, EarlyStopping("val end", patience=1)], max_epochs=4)
    run.fit(LogsInTheMainProcess(), loader(4, 1), loader(2, 1))
    files = {path.name: [file.name for file in path.iterdir()] for path in tmp_path.iterdir()}
    assert files == {**{name: ["epoch=1.ckpt"] for name in NAMES}, "steps": ["step=3.ckpt"]}
    assert run.current_epoch == 3
