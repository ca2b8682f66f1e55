"""Curves by steps as a fit records them: what loggers are handed, at its step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

import equipoise
from equipoise import RunSummary
from tests.support.callback_runs import Small, loader, trainer


def fit(module: Small, *loaders: Any, callbacks: Any = (), ckpt_path: Any = None, **options: Any) -> RunSummary:
    summary = RunSummary(table=False)
    options = {"max_epochs": 1, "enable_progress_bar": False, "num_sanity_val_steps": 0, **options}
    run = trainer(equipoise.Trainer, callbacks=[summary, *callbacks], **options)
    run.fit(module, *loaders, ckpt_path=ckpt_path)
    assert run.metric_listeners == []
    return summary


def by_step(summary: RunSummary) -> dict[str, dict[float, float]]:
    return {name: dict(curve) for name, curve in summary.recorded.step_curves().items()}


class Both(Small):
    """Logs its loss for steps and for the epoch, and a value that loggers do not receive."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("loss", float(self.global_step), on_step=True, on_epoch=True)
        self.log("quiet", float(self.global_step), logger=False)
        return self.layer(batch[0]).square().mean()


class Scheduled(Small):
    """Halves its learning rate after each step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class TestRecorded:
    @pytest.mark.parametrize("with_logger", [True, False])
    def test_values_stand_at_the_step_at_which_loggers_are_handed_them(self, with_logger: bool):
        logger = CSVLogger("logs") if with_logger else False
        options = {"logger": logger, "log_every_n_steps": 3, "val_check_interval": 0.5, "max_epochs": 2}
        summary = fit(Small(), loader(8), loader(1), **options)
        assert by_step(summary) == {
            "loss": {2: 2, 5: 5, 8: 8, 11: 11, 14: 14, 15: 15},
            "val_loss": {3: 10, 7: 10, 11: 11, 15: 11},
            "late": {7: 100, 15: 101},
        }
        assert summary.recorded.epoch_ends() == {1: 7, 2: 15}

    def test_a_value_of_steps_and_epochs_has_a_curve_for_each_and_one_without_a_logger_stands_at_the_end(self):
        assert by_step(fit(Both(), loader(4), max_epochs=2, log_every_n_steps=2)) == {
            "loss_step": {1: 1, 3: 3, 5: 5, 7: 7},
            "loss": {3: 1.5, 7: 5.5},
            "late": {3: 100, 7: 101},
            "quiet": {3: 3, 7: 7},
        }

    def test_a_step_of_the_users_own_moves_no_curve(self):
        class OwnStep(Small):
            def on_train_epoch_end(self) -> None:
                self.log("step", float(self.current_epoch))
                super().on_train_epoch_end()

        curves = by_step(fit(OwnStep(), loader(4), max_epochs=2, log_every_n_steps=4, logger=CSVLogger("logs")))
        assert curves["late"] == {3: 100, 7: 101}


class TestLearningRate:
    def test_the_rate_of_a_scheduler_is_recorded_with_the_values_of_steps_beside_a_monitor_or_not(self):
        monitored: dict[str, Any] = {"callbacks": [LearningRateMonitor()], "logger": CSVLogger("logs")}
        for options in ({}, monitored):
            curves = by_step(fit(Scheduled(), loader(6), log_every_n_steps=2, **options))
            assert curves["lr-SGD"] == {1: 0.25, 3: 0.0625, 5: 0.015625}


def fails_at(place: Callable[[Any, str, int], bool]) -> Small:
    def step(module: Any, stage: str, batch_idx: int) -> None:
        if place(module, stage, batch_idx):
            raise ValueError("stop")

    return Small(step)


class FailsAfterLogging(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.global_step == 7:
            raise ValueError("stop")
        return loss


@pytest.mark.parametrize(
    ("module", "batches", "expected"),
    [
        (fails_at(lambda module, stage, batch_idx: module.global_step == 7), 10, {2: 2, 5: 5, 6: 6}),
        (FailsAfterLogging(), 10, {2: 2, 5: 5, 7: 7}),
        (fails_at(lambda module, stage, batch_idx: stage == "val" and batch_idx == 1), 4, {2: 2}),
    ],
    ids=["before it logs", "after it logged", "in a validation"],
)
def test_a_fit_that_fails_leaves_the_last_values(module: Small, batches: int, expected: dict[float, float]):
    summary = RunSummary(table=False)
    options = {"max_epochs": 2, "log_every_n_steps": 3, "enable_progress_bar": False, "num_sanity_val_steps": 0}
    run = trainer(equipoise.Trainer, callbacks=[summary], **options)
    with pytest.raises(ValueError, match="stop"):
        run.fit(module, loader(batches), loader(2))
    assert run.metric_listeners == []
    assert by_step(summary) == {"loss": expected}


class TestResumed:
    @pytest.mark.parametrize(
        ("kind", "step", "every"), [(Both, 5, 2), (Small, 7, 3)], ids=["with logged steps to come", "without"]
    )
    def test_a_fit_resumed_in_the_midst_of_an_epoch_has_the_curves_of_a_whole_one(
        self, kind: type[Small], step: int, every: int, tmp_path: Path
    ):
        def saving() -> list[ModelCheckpoint]:
            return [ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=step, save_top_k=-1)]

        options: dict[str, Any] = {"max_epochs": 2, "enable_checkpointing": True, "log_every_n_steps": every}
        whole = fit(kind(), loader(8), loader(1), callbacks=saving(), **options)
        checkpoint = tmp_path / f"step={step}.ckpt"
        resumed = fit(kind(), loader(8), loader(1), callbacks=saving(), ckpt_path=checkpoint, **options)
        assert by_step(resumed) == by_step(whole)
        assert resumed.recorded.epoch_ends() == whole.recorded.epoch_ends() == {1: 7, 2: 15}

    def test_a_checkpoint_without_curves_by_step_is_taken(self):
        summary = RunSummary()
        summary.load_state_dict({"history": {"val_loss": {1.0: 0.5}}, "validation_names": ["val_loss"]})
        assert summary.history == {"val_loss": {1.0: 0.5}}
        assert by_step(summary) == {}
