"""Training loaders by themselves: when they are requested, how many steps they allow, and the order of an epoch."""

import math
from typing import Any

import pytest

from equipoise.trainer.data.training_data import TrainingData
from equipoise.trainer.state.run_state import RunState
from tests.support.contexts import training_context
from tests.support.trainer_runs import Small, loader


def state(epoch: int = 0, **settings: Any) -> RunState:
    """The state of a run after so many epochs, with these fields."""
    run_state = RunState(**settings)
    run_state.progress.epoch.current.set(epoch)
    return run_state


def requested(batches: int = 4, **options: Any) -> TrainingData:
    """Data whose loaders were requested."""
    context = training_context(Small(), None, {"train": loader(batches, **options)}, enable_model_summary=False)
    data = TrainingData()
    data.request(context)
    return data


@pytest.mark.parametrize(
    ("every", "loaded_at", "epoch", "is_due"),
    [(0, 0, 9, False), (1, 0, 0, False), (1, 0, 1, True), (3, 2, 4, False), (3, 2, 5, True)],
)
def test_a_repeated_request_is_due(every: int, loaded_at: int, epoch: int, is_due: bool) -> None:
    data = requested()
    data.loaded_at = loaded_at
    assert data.is_request_due(state(epoch, reload_dataloaders_every_n_epochs=every)) is is_due


def test_the_first_request_is_due_unless_nothing_is_read() -> None:
    data = TrainingData()
    assert data.is_request_due(state())
    assert not data.is_request_due(state(limit_train_batches=0))
    forgets = requested()
    forgets.forget()
    assert forgets.is_request_due(state())
    assert forgets.loaded_at == -math.inf


@pytest.mark.parametrize(
    ("max_batches", "settings", "steps"),
    [
        (10, {"max_epochs": 3}, 30),
        (10, {"max_epochs": 3, "accumulate_grad_batches": 4}, 9),
        (10, {"max_epochs": 3, "max_steps": 12}, 12),
        (10, {"max_epochs": 3, "max_steps": 99}, 30),
        (10, {"max_epochs": None}, 10),
        (10, {"max_epochs": -1}, math.inf),
        (10, {"max_epochs": -1, "max_steps": 7}, 7),
        (math.inf, {"max_epochs": 3}, -1),
        (math.inf, {"max_epochs": 3, "max_steps": 7}, 7),
    ],
)
def test_estimated_steps(max_batches: float, settings: dict[str, Any], steps: float) -> None:
    data = TrainingData()
    data.max_batches = max_batches
    assert data.estimated_steps(state(**settings)) == steps


def test_a_short_epoch_is_warned_of_only_if_there_is_a_logger() -> None:
    data = TrainingData()
    data.max_batches = 3
    data.warn_of_rare_logs(state(log_every_n_steps=5))
    logger: Any = object()
    data.warn_of_rare_logs(state(log_every_n_steps=3, loggers=[logger]))
    data.warn_of_rare_logs(state(log_every_n_steps=5, loggers=[logger], fast_dev_run=True))
    with pytest.warns(UserWarning, match="3 batches, fewer than log_every_n_steps=5"):
        data.warn_of_rare_logs(state(log_every_n_steps=5, loggers=[logger]))
