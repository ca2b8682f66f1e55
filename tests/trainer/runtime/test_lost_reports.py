"""Callbacks that report to Ray are refused in processes that Ray does not know."""

import pytest
from lightning.pytorch import Callback

from equipoise import ConfigurationError
from equipoise.extensions.ray.ray import RayReport
from tests.support.trainer_runs import Small, loader, trainer

# A class as Ray's own, and one that a user derives from it.
OfRay = type("TuneReportCheckpointCallback", (Callback,), {"__module__": "ray.tune.integration.pytorch_lightning"})
OfUser = type("Mine", (OfRay,), {"__module__": "mine"})


@pytest.mark.parametrize("callback", [OfRay, OfUser, RayReport])
def test_a_callback_that_reports_is_refused_before_processes_start(callback):
    run = trainer(strategy="ddp", devices=2, callbacks=[callback()])
    with pytest.raises(ConfigurationError, match=rf"{callback.__name__} reports to Ray.*all of them would be lost"):
        run.fit(Small(), loader())


def test_in_one_process_it_runs():
    class Counting(OfRay):
        count = 0

        def on_train_epoch_end(self, trainer, pl_module):
            self.count += 1

    callback = Counting()
    trainer(max_epochs=2, callbacks=[callback]).fit(Small(), loader())
    assert callback.count == 2


def test_a_report_outside_of_ray():
    with pytest.raises(ConfigurationError, match="neither a worker of Ray Train nor a trial of Ray Tune"):
        trainer(callbacks=[RayReport()]).fit(Small(), loader())
