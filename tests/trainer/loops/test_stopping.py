"""The end of training: each limit, and requests to stop before the minimum."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from equipoise.trainer.loops.fit_state import FitState
from equipoise.trainer.loops.stopping import Stopping
from equipoise.trainer.state.run_state import RunState
from tests.support.trainer_runs import Small, loader, trainer


def stopping(epochs: int = 0, steps: int = 0, **settings: Any) -> Stopping:
    """Stopping of a run after so many epochs and steps, with these fields of the RunState."""
    state = RunState(**settings)
    state.progress.epoch.current.set(epochs)
    context: Any = SimpleNamespace(state=state, global_step=steps)
    return Stopping(context, FitState(state.progress))


@pytest.mark.parametrize(
    ("settings", "epochs", "steps", "is_over"),
    [
        ({}, 9, 9, False),
        ({"max_steps": 3}, 0, 2, False),
        ({"max_steps": 3}, 0, 3, True),
        ({"max_steps": 0}, 0, 0, True),
        ({"max_steps": -1}, 0, 99, False),
        ({"max_epochs": 2}, 1, 9, False),
        ({"max_epochs": 2}, 2, 0, True),
        ({"max_epochs": 0}, 0, 0, True),
        ({"max_epochs": -1}, 99, 0, False),
        ({"should_stop": True}, 0, 0, True),
        ({"should_stop": True, "min_epochs": 2}, 1, 9, False),
        ({"should_stop": True, "min_epochs": 2}, 2, 9, True),
        ({"should_stop": True, "min_steps": 5}, 1, 4, False),
        ({"should_stop": True, "min_steps": 5}, 1, 5, True),
        ({"should_stop": True, "min_epochs": 3, "max_steps": 2}, 0, 2, True),
    ],
)
def test_training_is_over(settings: dict[str, Any], epochs: int, steps: int, is_over: bool) -> None:
    assert stopping(epochs, steps, **settings).is_over() is is_over


def test_the_last_epoch_is_completed() -> None:
    ends = stopping(max_epochs=1)
    ends.fit.progress.epoch.current.processed = 1
    assert ends.is_over()
    assert ends.fit.progress.epoch.current.completed == 1


def test_a_request_that_waits_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    waits = stopping(should_stop=True, min_epochs=2, min_steps=7)
    with caplog.at_level("INFO"):
        assert [waits.may_stop() for _ in range(3)] == [False] * 3
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 1
    assert "min_epochs=2" in texts[0]
    assert "min_steps=7" in texts[0]


def test_nothing_is_reported_where_training_may_stop(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert stopping(should_stop=True).may_stop()
    assert not caplog.records


@pytest.mark.parametrize("limit", ["max_epochs", "max_steps"])
def test_a_module_that_an_earlier_fit_leaves_nothing_to_train_is_reported(limit: str, tmp_path: Path) -> None:
    limits = {"max_epochs": -1, limit: 2}
    run = trainer(**limits)
    run.fit(Small(), loader(2))
    path = tmp_path / "a.ckpt"
    run.save_checkpoint(path)
    second = Small()
    with pytest.warns(UserWarning, match=rf"trains nothing: an earlier fit .* {limit}=2, .* new Trainer .*{limit}"):
        run.fit(second, loader(2))
    assert not second.ran
    # The remedies.
    setattr(run.fit_loop, limit, 4)
    run.fit(second, loader(2))
    assert second.ran
    # A job that is started once more after its end is no mistake.
    trainer(**limits).fit(Small(), loader(2), ckpt_path=path)


@pytest.mark.parametrize("limit", ["max_epochs", "max_steps"])
def test_a_limit_of_zero_is_meant(limit: str) -> None:
    trainer(**{limit: 0}).fit(Small(), loader(2))
