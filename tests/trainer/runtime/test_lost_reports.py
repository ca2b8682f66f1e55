"""Callbacks that report to Ray are refused in processes that Ray does not know."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.demos.boring_classes import BoringModel

from equipoise import ConfigurationError, Trainer
from equipoise.extensions.ray.ray import RayReport

OPTIONS = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}

# A class as Ray's own, and one that a user derives from it.
OfRay = type("TuneReportCheckpointCallback", (Callback,), {"__module__": "ray.tune.integration.pytorch_lightning"})
OfUser = type("Mine", (OfRay,), {"__module__": "mine"})


@pytest.mark.parametrize("callback", [OfRay, OfUser, RayReport])
def test_a_callback_that_reports_is_refused_before_processes_start(callback):
    trainer = Trainer(strategy="ddp", devices=2, callbacks=[callback()], **OPTIONS)
    with pytest.raises(ConfigurationError, match=rf"{callback.__name__} reports to Ray.*all of them would be lost"):
        trainer.fit(BoringModel(), torch.utils.data.DataLoader(torch.ones(4, 32)))


def test_in_one_process_it_runs():
    class Counting(OfRay):
        count = 0

        def on_train_epoch_end(self, trainer, pl_module):
            self.count += 1

    callback = Counting()
    trainer = Trainer(max_epochs=2, limit_train_batches=1, limit_val_batches=0, callbacks=[callback], **OPTIONS)
    trainer.fit(BoringModel())
    assert callback.count == 2


def test_a_report_outside_of_ray():
    trainer = Trainer(max_epochs=1, callbacks=[RayReport()], **OPTIONS)
    with pytest.raises(ConfigurationError, match="neither a worker of Ray Train nor a trial of Ray Tune"):
        trainer.fit(BoringModel())
