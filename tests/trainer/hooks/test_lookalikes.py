"""Callbacks and loggers of any class work, if they have the methods that a run calls; else the error names them."""

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from equipoise import Trainer
from tests.support.trainer_runs import Small, loader, refuses, trainer

pytestmark = pytest.mark.filterwarnings("ignore:The `srun` command")
BOTH = pytest.mark.parametrize("cls", [L.Trainer, Trainer], ids=["lightning", "ours"])
WITHOUT_STATE = [name for name in dir(Callback) if not name.startswith("_") and "state" not in name]


def mock_of_a_callback(**options: Any) -> Any:
    mocked = Mock(**options)
    mocked.state_dict.return_value = {}
    mocked.state_key = "mocked"
    return mocked


@BOTH
@pytest.mark.parametrize("options", [{}, {"spec": Callback}], ids=["mock", "mock-of-the-class"])
def test_a_mock_of_a_callback(cls: Any, options: dict[str, Any], tmp_path: Path) -> None:
    mocked = mock_of_a_callback(**options)
    run = trainer(cls, callbacks=[mocked])
    run.fit(module := Small(), loader())
    run.save_checkpoint(tmp_path / "x.ckpt")
    assert mocked.on_train_batch_end.call_count == 3
    mocked.on_train_start.assert_called_once_with(run, module)
    assert "mocked" not in torch.load(tmp_path / "x.ckpt", weights_only=True)["callbacks"]


def test_a_callback_without_a_state(tmp_path: Path) -> None:
    class Hooked:
        """A class of its own with the hooks of a callback, and nothing about states."""

        ran: list[str]

        def __init__(self) -> None:
            self.ran = []

        def __getattr__(self, name: str) -> Any:
            if name not in WITHOUT_STATE:
                raise AttributeError(name)
            return lambda *args, **kwargs: self.ran.append(name)

    hooked = Hooked()
    run = trainer(callbacks=[hooked])
    run.fit(Small(), loader())
    run.save_checkpoint(tmp_path / "x.ckpt")
    trainer(max_epochs=2, callbacks=[hooked]).fit(Small(), loader(), ckpt_path=tmp_path / "x.ckpt")
    assert hooked.ran.count("on_train_batch_end") == 6


def test_a_mock_that_can_be_iterated_is_one_logger() -> None:
    run = trainer(logger=(mocked := MagicMock(save_dir=None)), log_every_n_steps=1)
    assert run.loggers == [mocked]
    run.fit(Small(), loader())
    assert [call.kwargs["step"] for call in mocked.log_metrics.call_args_list] == [0, 1, 2]


@pytest.mark.parametrize("given", [object(), "csv", [Mock(spec=["log_metrics", "save"])], Mock])
def test_what_lacks_methods_is_no_logger(given: Any) -> None:
    refuses(lambda: trainer(logger=given), "logger must be True, False", "log_metrics", "finalize", "not")


def test_the_best_of_two_checkpoint_callbacks(tmp_path: Path) -> None:
    keepers = [ModelCheckpoint(tmp_path / mode, monitor="loss", mode=mode) for mode in ("min", "max")]
    run = trainer(callbacks=keepers, enable_checkpointing=True)
    run.fit(Small(), loader())
    with pytest.warns(UserWarning, match=r"2 callbacks save checkpoints.*the first is used, which monitors 'loss'"):
        run.test(Small(), loader(), ckpt_path="best", verbose=False)
    assert run.ckpt_path == keepers[0].best_model_path


def test_the_best_is_that_of_the_callback_that_monitors(tmp_path: Path) -> None:
    keepers = [ModelCheckpoint(tmp_path / "first"), ModelCheckpoint(tmp_path / "second", monitor="loss")]
    run = trainer(callbacks=keepers, enable_checkpointing=True)
    run.fit(Small(), loader())
    run.test(Small(), loader(), ckpt_path="best", verbose=False)
    assert run.ckpt_path == keepers[1].best_model_path
