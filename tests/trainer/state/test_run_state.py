"""Copies of a run for another process: plain data, without the objects of this process."""

import pickle

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import SGD
from torch.optim.lr_scheduler import ConstantLR

from equipoise import Trainer
from equipoise.trainer.preparation import begin_run
from equipoise.trainer.runtime.request import Request
from equipoise.trainer.state.run_state import RunState
from tests.support.trainer_runs import Small, trainer


def test_a_copy_of_the_state_has_no_optimisers_schedulers_and_listeners() -> None:
    optimizer = SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    state = RunState(max_steps=7, stop_requests={""}, root_dir="runs")
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


def test_a_copy_of_the_trainer_is_complete_but_has_no_run() -> None:
    run = trainer(Trainer)
    begin_run(run.parts, Request(TrainerFn.FITTING, Small()))
    assert run.lightning_module is not None

    copy = pickle.loads(pickle.dumps(run))

    assert copy.parts.trainer is copy
    assert copy.parts.state is copy.run_state
    assert copy.fit_loop_state.state is copy.run_state
    assert copy.strategy.run_state is copy.run_state
    assert copy.lightning_module is None
    copy.max_epochs = 3
    assert copy.fit_loop.max_epochs == 3
