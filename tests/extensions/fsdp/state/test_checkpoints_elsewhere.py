"""Sharded checkpoints elsewhere, of real processes: written by all, kept and removed, and read by any number."""

import os
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from equipoise import CheckpointError
from tests.extensions.fsdp.programs import Net, SavesAfter, assert_close, fit, fsdp, loader, weights_of
from tests.support.elsewhere import url_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:The checkpoint holds states of callbacks",
        "ignore:The run began with",
        "ignore:Ranks from 1 on begin with",
    ),
]

# Of each process that writes; a step has 12 samples.
BATCH_SIZE = 6


def sharded(**options: Any) -> Any:
    return fsdp(checkpoints="sharded", **options)


class There(Net):
    """Its class brings the file system to all processes."""


class Saves(SavesAfter):
    """So does this callback."""


@pytest.mark.parametrize(("strategy", "processes"), [("single_device", 1), (fsdp(), 3)], ids=["one device", "3"])
def test_a_run_continues_from_there(strategy: Any, processes: int, tmp_path: Path) -> None:
    """Within an accumulation window."""
    url, options = url_of(tmp_path / "open.ckpt"), {"accumulate_grad_batches": 2, "max_epochs": 1}
    fit(There, sharded(), 2, callbacks=[Saves(url, 2)], **options)
    module, _ = fit(There, strategy, processes, batch_size=BATCH_SIZE, ckpt_path=url, **options)
    assert_close(weights_of(fit(There, **options)[0]), weights_of(module))


def test_a_model_checkpoint_keeps_the_best_and_the_last_there(tmp_path: Path) -> None:
    """The last one is replaced at each step; a run goes on from it by its word."""
    options: dict[str, Any] = {"enable_checkpointing": True, "count": 60}

    def keeper() -> ModelCheckpoint:
        monitors = {"monitor": "step", "mode": "max", "save_last": True, "every_n_train_steps": 1}
        return ModelCheckpoint(url_of(tmp_path), filename="{step}", **monitors)

    strategy = sharded(save_in_background=True)
    module, trainer = fit(There, strategy, 2, callbacks=[keeper()], max_epochs=1, **options)
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "step=5.ckpt"]
    assert trainer.checkpoint_callback.best_model_path == url_of(tmp_path / "step=5.ckpt")
    trainer.validate(module, loader(7, 3), ckpt_path="best", verbose=False)
    # Another process, as it were, on one device.
    one, _ = fit(There, callbacks=[keeper()], batch_size=BATCH_SIZE, ckpt_path="last", **options)
    assert_close(weights_of(fit(There, count=60)[0]), weights_of(one))
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "step=10.ckpt"]


def test_a_file_system_that_processes_do_not_share_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"does not see 'rank-00001.*Choose a file system that all processes"):
        fit(There, sharded(), 2, callbacks=[Saves("memory://a.ckpt", 0)], max_epochs=1, count=12)
