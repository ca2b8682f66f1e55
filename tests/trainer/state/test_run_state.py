"""Copies of a run for another process: plain data, without the objects of this process."""

import pickle

from lightning.pytorch.trainer.states import TrainerFn

from equipoise import Trainer
from equipoise.trainer.preparation import begin_run
from equipoise.trainer.runtime.request import Request
from tests.support.trainer_runs import Small, trainer


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
