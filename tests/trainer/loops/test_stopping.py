"""Requests to stop before the minimum, and limits that leave nothing to train; for all others see `tests/parity`."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from tests.support.trainer_runs import Small, Validated, loader, trainer, with_step


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


class Follows(Validated):
    """Its validations have the given values, one after the other."""

    values = (3.0, 4.0, 2.0, 1.0, 1.5, 1.5, 0.0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", self.values[self.current_epoch])
        self.log("other", 1.0)

    def on_train_epoch_end(self) -> None:
        self.log("value", self.values[self.current_epoch])


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("at_epoch_end", [False, True])
@pytest.mark.parametrize(
    ("minimum", "epochs"),
    [({"min_epochs": 2}, 2), ({"min_epochs": 3}, 5), ({"min_steps": 9}, 5), ({"min_epochs": 6}, 6)],
)
def test_early_stopping_that_recovers_before_the_minimum_stops_no_run(
    minimum: dict[str, int], epochs: int, at_epoch_end: bool, tmp_path: Path
) -> None:
    """Neither in a run at once, nor in one that is resumed while the request waits."""

    def run(**options: Any) -> Any:
        stopping = EarlyStopping("value", patience=1, check_on_train_epoch_end=at_epoch_end)
        files = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1, monitor="value")
        made = trainer(max_epochs=7, callbacks=[stopping, files], enable_checkpointing=True, **minimum)
        made.fit(Follows(), loader(3), loader(1), **options)
        return made

    assert run().current_epoch == epochs
    assert run(ckpt_path=tmp_path / "epoch=1.ckpt").current_epoch == epochs


@pytest.mark.parametrize("asks_first", [False, True])
def test_the_requests_of_others_stay(asks_first: bool) -> None:
    class Asks(Follows):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.current_epoch == (0 if asks_first else 1):
                self.trainer.should_stop = True

    stopping = EarlyStopping("value", patience=1)
    of_another = EarlyStopping("other", patience=2)
    for module, callbacks in ((Asks(), [stopping]), (Follows(), [stopping, of_another])):
        run = trainer(max_epochs=7, min_epochs=3, callbacks=callbacks)
        run.fit(module, loader(3), loader(1))
        assert run.current_epoch == 3


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


@pytest.mark.parametrize("automatic", [True, False])
def test_a_stop_iteration_that_a_step_raises_ends_the_run_with_this_error(automatic: bool) -> None:
    module = with_step(lambda module, batch: next(iter(())))
    module.automatic_optimization = automatic
    with pytest.raises(StopIteration):
        trainer().fit(module, loader())
