"""Requests to stop before the minimum, and limits that leave nothing to train; for all others see `tests/parity`."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.trainer_runs import Small, loader, trainer


@pytest.mark.parametrize(("minimum", "reports"), [({"min_epochs": 2, "min_steps": 7}, 1), ({}, 0)])
def test_a_request_that_waits_is_reported_once(
    minimum: dict[str, int], reports: int, caplog: pytest.LogCaptureFixture
) -> None:
    class Asks(Small):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.trainer.should_stop = True

    with caplog.at_level("INFO"):
        trainer(max_epochs=4, **minimum).fit(Asks(), loader(3))
    texts = [message for message in caplog.messages if "was asked to stop" in message]
    assert ["min_epochs=2 or min_steps=7" in text for text in texts] == [True] * reports


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
