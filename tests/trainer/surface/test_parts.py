"""TrainerParts: what a run is carried out on, without the trainer."""

import pickle

import pytest
from lightning.pytorch.trainer.states import TrainerFn

from equipoise import Trainer
from equipoise.trainer.preparation import make_context
from equipoise.trainer.runtime.request import Request
from tests.support.trainer_runs import Small, trainer


def test_the_trainer_shows_the_objects_of_its_parts() -> None:
    run = trainer(Trainer)
    parts = run.parts
    assert parts.trainer is run
    assert parts.state is run.run_state
    assert parts.logs is run.logs
    assert parts.fit_loop is run.fit_loop_state
    assert parts.strategy is run.connected_strategy
    assert parts.strategy_view is run.strategy


def test_a_copy_for_another_process_is_complete_but_has_no_run() -> None:
    run = trainer(Trainer)
    run.parts.begin_run(make_context(run.parts, Request(TrainerFn.FITTING, Small())))
    assert run.lightning_module is not None

    copy = pickle.loads(pickle.dumps(run))

    assert copy.parts.trainer is copy
    assert copy.parts.state is copy.run_state
    assert copy.fit_loop_state.state is copy.run_state
    assert copy.strategy.run_state is copy.run_state
    assert copy.lightning_module is None
    copy.max_epochs = 3
    assert copy.fit_loop.max_epochs == 3


def test_the_active_evaluation_is_that_of_the_stage() -> None:
    parts = trainer(Trainer).parts
    state = parts.state
    assert parts.active_evaluation is None
    state.begin(TrainerFn.FITTING)
    assert parts.active_evaluation is None
    state.validating = True
    assert parts.active_evaluation is parts.fit_loop.val_loop
    state.begin(TrainerFn.VALIDATING)
    assert parts.active_evaluation is parts.evaluations["validate"]
    assert parts.validation is parts.evaluations["validate"]
    state.begin(TrainerFn.TESTING)
    assert parts.active_evaluation is parts.evaluations["test"]
    assert parts.validation is parts.fit_loop.val_loop
    state.begin(TrainerFn.PREDICTING)
    assert parts.active_evaluation is parts.predict_loop


@pytest.mark.parametrize("automatic", [True, False])
def test_steps_are_counted_as_the_module_optimises(automatic: bool) -> None:
    parts = trainer(Trainer).parts
    parts.state.progress.optimizer_step.count()
    parts.state.progress.manual_step.count()
    parts.state.progress.manual_step.count()
    assert parts.global_step == 1
    module = Small()
    module.automatic_optimization = automatic
    parts.begin_run(make_context(parts, Request(TrainerFn.FITTING, module)))
    assert parts.global_step == (1 if automatic else 2)
