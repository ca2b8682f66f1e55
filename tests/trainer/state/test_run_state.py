"""RunState: plain data, which another process receives without the objects of this one."""

import pickle

import pytest
import torch
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import SGD
from torch.optim.lr_scheduler import ConstantLR

from equipoise.trainer.state.run_state import RunState


def test_every_state_has_objects_of_its_own() -> None:
    first = RunState()
    second = RunState()
    first.callbacks.append(object())  # type: ignore[arg-type]
    first.progress.epoch.count()
    first.status.stage = RunningStage.TRAINING
    assert second.callbacks == []
    assert second.current_epoch == 0
    assert second.status.stage is None


def test_a_copy_for_another_process_has_no_optimisers_schedulers_and_listeners() -> None:
    optimizer = SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    state = RunState(max_steps=7, should_stop=True, root_dir="runs")
    state.optimizers = [optimizer]
    state.lr_scheduler_configs = [LRSchedulerConfig(ConstantLR(optimizer))]
    state.metric_listeners.append(print)
    state.progress.epoch.count()

    copy = pickle.loads(pickle.dumps(state))

    assert copy.max_steps == 7
    assert copy.should_stop
    assert copy.default_root_dir == "runs"
    assert copy.current_epoch == 1
    assert copy.optimizers == copy.lr_scheduler_configs == copy.metric_listeners == []
    assert state.optimizers == [optimizer]
    assert len(state.metric_listeners) == len(state.lr_scheduler_configs) == 1


def test_the_present_epoch_is_that_of_the_counters() -> None:
    state = RunState()
    state.progress.epoch.count()
    state.progress.epoch.count()
    assert state.current_epoch == 2


@pytest.mark.parametrize("stage", ["training", "validating", "testing", "predicting", "sanity_checking"])
def test_a_stage_is_set_and_left_by_its_name(stage: str) -> None:
    state = RunState()
    setattr(state, stage, True)
    assert getattr(state, stage)
    assert state.status.stage is not None
    assert state.evaluating == state.status.stage.evaluating
    setattr(state, stage, False)
    assert state.status.stage is None


def test_leaving_a_stage_keeps_another() -> None:
    state = RunState()
    state.training = True
    state.validating = False
    assert state.training


def test_fitting_holds_during_its_validations() -> None:
    state = RunState()
    assert not state.fitting
    state.status.fn = TrainerFn.FITTING
    state.validating = True
    assert state.fitting
    state.status.fn = TrainerFn.VALIDATING
    assert not state.fitting


def test_an_interrupted_run_is_known() -> None:
    state = RunState()
    assert not state.interrupted
    state.status.status = TrainerStatus.INTERRUPTED
    assert state.interrupted


def test_a_root_folder_is_a_path_or_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/user")
    assert RunState(root_dir="~/runs/./first").default_root_dir == "/home/user/runs/first"
    assert RunState(root_dir="s3://bucket/./runs").default_root_dir == "s3://bucket/./runs"
