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


def test_fitting_holds_during_its_validations() -> None:
    state = RunState()
    assert not state.fitting
    state.status.fn = TrainerFn.FITTING
    state.validating = True
    assert state.fitting
    state.status.fn = TrainerFn.VALIDATING
    assert not state.fitting


def test_a_run_begins_in_the_stage_of_its_entry_point_and_ends_in_none() -> None:
    state = RunState(should_stop=True)
    status = state.status
    state.begin(TrainerFn.TESTING)
    assert state.testing
    assert not state.should_stop
    assert status.status == TrainerStatus.RUNNING
    state.finish()
    assert status.stage is None
    assert status.status == TrainerStatus.FINISHED
    # Users may hold the object.
    assert state.status is status


def test_a_failed_run_stays_in_its_stage_until_it_is_left() -> None:
    state = RunState()
    state.begin(TrainerFn.FITTING)
    state.interrupt()
    assert state.interrupted
    assert state.training
    state.leave()
    assert state.status.stage is None
    assert state.fitting


def test_results_are_what_a_caller_receives_from_other_processes() -> None:
    state = RunState(max_steps=7)
    state.loaded_ckpt_path = "last.ckpt"
    results = state.results()
    assert results["loaded_ckpt_path"] == "last.ckpt"
    assert results["status"] is state.status
    assert results["progress"] is state.progress
    assert results.keys() == {
        "status",
        "should_stop",
        "received_sigterm",
        "progress",
        "loaded_ckpt_path",
        "managed_ckpt_path",
        "optimizers",
        "lr_scheduler_configs",
    }


def test_epochs_have_a_default_that_depends_on_other_limits() -> None:
    steps = RunState(max_steps=5)
    steps.set_default_epochs(has_timer=False)
    assert (steps.max_epochs, steps.min_epochs) == (-1, 0)

    timed = RunState(min_steps=3)
    timed.set_default_epochs(has_timer=True)
    assert (timed.max_epochs, timed.min_epochs) == (-1, 1)

    chosen = RunState(max_epochs=2, min_epochs=1)
    chosen.set_default_epochs(has_timer=False)
    assert (chosen.max_epochs, chosen.min_epochs) == (2, 1)

    unlimited = RunState()
    with pytest.warns(UserWarning, match="ends after 1000 epochs"):
        unlimited.set_default_epochs(has_timer=False)
    assert unlimited.max_epochs == 1000
