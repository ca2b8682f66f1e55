"""Sharded checkpoints elsewhere, of real processes: written by all, kept and removed, and read by any number."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from equipoise import CheckpointError, WorkerError, merge_shards
from equipoise.extensions.export import export_weights, read_weights
from tests.extensions.fsdp.programs import Net, SavesAfter, assert_close, fit, fsdp, loader, weights_of
from tests.support.elsewhere import Elsewhere, url_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:The checkpoint holds states of callbacks", "ignore:The run began with", "ignore:Ranks from 1 on begin with"
)


# Of each process that writes; a step has 12 samples.
BATCH_SIZE = 6
WINDOW = {"accumulate_grad_batches": 2, "max_epochs": 1}


def sharded(**options: Any) -> Any:
    return fsdp(checkpoints="sharded", **options)


class There(Net):
    """Its class brings the file system to all processes."""


class Saves(SavesAfter):
    """So does this callback."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two processes, within an accumulation window."""
    folder = tmp_path_factory.mktemp("elsewhere") / "open.ckpt"
    fit(There, sharded(), 2, callbacks=[Saves(url_of(folder), 2)], **WINDOW)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "processes"), [("single_device", 1), (fsdp(), 3)], ids=["one device", "3"])
def test_a_run_continues_from_there(strategy: Any, processes: int, folder: Path) -> None:
    module, _ = fit(There, strategy, processes, batch_size=BATCH_SIZE, ckpt_path=url_of(folder), **WINDOW)
    assert_close(weights_of(fit(There, **WINDOW)[0]), weights_of(module))


@pytest.mark.slow
def test_shards_there_are_merged_and_exported(folder: Path, tmp_path: Path) -> None:
    whole = merge_shards(url_of(folder), tmp_path / "whole.ckpt")
    weights = torch.load(whole, weights_only=False)["state_dict"]
    export_weights(url_of(folder), url_of(tmp_path / "x.safetensors"))
    exported = read_weights(url_of(tmp_path / "x.safetensors"))
    assert exported.keys() == Net().state_dict().keys()
    assert_close(weights, exported, 0.0)


@pytest.mark.slow
def test_a_model_checkpoint_keeps_the_best_and_the_last_there(tmp_path: Path) -> None:
    """The last one is replaced at each step; a run goes on from it by its word."""
    monitors = {"monitor": "step", "mode": "max", "save_last": True, "every_n_train_steps": 1}
    options: dict[str, Any] = {"enable_checkpointing": True, "count": 60, "max_epochs": 1}
    keeper = ModelCheckpoint(url_of(tmp_path), filename="{step}", **monitors)
    module, trainer = fit(There, sharded(save_in_background=True), 2, callbacks=[keeper], **options)
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "step=5.ckpt"]
    assert [len(os.listdir(tmp_path / name)) for name in os.listdir(tmp_path)] == [4, 4]
    assert keeper.best_model_path == url_of(tmp_path / "step=5.ckpt")
    for path in ("best", "last"):
        trainer.validate(module, loader(7, 3), ckpt_path=path, verbose=False)
    # Another process, as it were, on one device.
    again = ModelCheckpoint(url_of(tmp_path), filename="{step}", **monitors)
    options["max_epochs"] = 2
    one, _ = fit(There, callbacks=[again], batch_size=BATCH_SIZE, ckpt_path="last", **options)
    whole, _ = fit(There, count=60, max_epochs=2)
    assert_close(weights_of(whole), weights_of(one))
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "step=10.ckpt"]
    assert all(path.is_file() for path in tmp_path.iterdir())


class Fails(Callback):
    """Saves twice under one name; the second time a process fails in the midst of its write."""

    def __init__(self, path: str, fault: Callable[[], Any] | None) -> None:
        self.path = path
        self.fault = fault

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            trainer.save_checkpoint(self.path)
            trainer.strategy.portable.folders.finish()
        if batch_idx == 1:
            Elsewhere.faulty = "rank-00001"
            Elsewhere.fault = self.fault
            trainer.save_checkpoint(self.path)


def is_killed() -> None:
    os.kill(os.getpid(), 9)


@pytest.mark.thorough
@pytest.mark.parametrize("behind", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["at once", "behind"])
def test_an_earlier_checkpoint_there_survives_a_write_that_fails(behind: bool, tmp_path: Path) -> None:
    url = url_of(tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"a\.ckpt' cannot be written: ConnectionError: the line is dead"):
        fit(There, sharded(save_in_background=behind), 2, callbacks=[Fails(url, None)], max_epochs=1)
    assert len(os.listdir(tmp_path / "a.ckpt")) == 4
    module, _ = fit(There, ckpt_path=url, batch_size=BATCH_SIZE, max_epochs=1)
    undisturbed, _ = fit(There, max_epochs=1)
    assert_close(weights_of(undisturbed), weights_of(module))


@pytest.mark.slow
def test_an_earlier_checkpoint_there_survives_a_kill(tmp_path: Path) -> None:
    """Nothing of the killed process is left after the next save."""
    url = url_of(tmp_path / "a.ckpt")
    with pytest.raises(WorkerError, match="SIGKILL"):
        fit(There, sharded(), 2, callbacks=[Fails(url, is_killed)], max_epochs=1)
    assert len(os.listdir(tmp_path / "a.ckpt")) >= 4
    module, _ = fit(There, sharded(), 2, ckpt_path=url, callbacks=[Saves(url, 3)], max_epochs=1)
    undisturbed, _ = fit(There, max_epochs=1)
    assert_close(weights_of(undisturbed), weights_of(module))
    assert len(os.listdir(tmp_path / "a.ckpt")) == 4


@pytest.mark.slow
def test_a_file_system_that_processes_do_not_share_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"does not see 'rank-00001.*Choose a file system that all processes"):
        fit(There, sharded(), 2, callbacks=[Saves("memory://a.ckpt", 0)], max_epochs=1, count=12)
