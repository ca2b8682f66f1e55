"""The end of a fit, and Ctrl-C in it, name the checkpoint that continues it, and what is lost."""

import logging
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.support.trainer_runs import Small, loader, trainer


class Interrupted(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 3:
            raise KeyboardInterrupt
        return super().training_step(batch, batch_idx)


def fit(module: Small, saving: ModelCheckpoint | None) -> None:
    callbacks = [] if saving is None else [saving]
    run = trainer(callbacks=callbacks, enable_checkpointing=saving is not None, max_epochs=2)
    run.fit(module, loader(2))


def test_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.INFO):
        fit(Small(), ModelCheckpoint(tmp_path, filename="mine"))
        assert caplog.messages[-1] == "A larger max_epochs with ckpt_path='mine.ckpt' continues the fit."
        fit(Small(), None)
        assert caplog.messages[-1] == "`Trainer.fit` stopped: `max_epochs=2` reached."


def test_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyboardInterrupt) as caught:
        fit(Interrupted(), ModelCheckpoint(tmp_path, save_last=True))
    note = "The newest checkpoint is of step 2. Lost: 1 step. ckpt_path='last.ckpt' continues."
    assert caught.value.__notes__ == [note]
    with pytest.raises(KeyboardInterrupt) as caught:
        fit(Interrupted(), None)
    assert caught.value.__notes__ == ["There is no checkpoint of this fit. Lost: 3 steps."]
