"""Sharded checkpoints: each process writes its shards, and any strategy and number of processes resumes from them."""

import copy
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import equipoise
from equipoise import CheckpointError, FSDPStrategy, WorkerError, merge_shards
from equipoise.extensions.fsdp.state.writing import pieces, saving
from tests.extensions.fsdp.modules import Tied
from tests.extensions.fsdp.programs import Net, SavesAfter, assert_close, fit, fsdp, loader, make, weights_of
from tests.support.trainer_runs import refuses

pytestmark = pytest.mark.filterwarnings(
    "ignore:The checkpoint holds states of callbacks", "ignore:The run began with", "ignore:Ranks from 1 on begin with"
)

# Of each process that writes; a step has 12 samples.
BATCH_SIZE = 6
WINDOW = {"accumulate_grad_batches": 2, "max_epochs": 1}


def sharded(**options: Any) -> FSDPStrategy:
    return fsdp(checkpoints="sharded", **options)


class KeepsTwo(equipoise.Callback):
    """Has two copies of the weights: those of the beginning, and those of the last step."""

    copies_weights = True

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self.copies = [copy.deepcopy(module) for _ in range(2)]

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.copies[1].load_state_dict(module.state_dict())

    def state_dict(self) -> dict[str, Any]:
        return dict(zip(("first", "last"), (copied.state_dict() for copied in self.copies), strict=True))


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["at once", "behind"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two processes, within an accumulation window."""
    path = tmp_path_factory.mktemp("sharded") / "open.ckpt"
    strategy = sharded(save_in_background=request.param)
    fit(Net, strategy, 2, callbacks=[KeepsTwo(), SavesAfter(path, 2)], **WINDOW)
    return path


def tensors_in(path: Path) -> dict[str, Any]:
    """Return the entries of a checkpoint's index that are in shards."""
    tensors: dict[str, Any] = json.loads((path / "index.json").read_text())["content"]["tensors"]
    return tensors


# Written by two, read by others.


@pytest.mark.thorough
def test_each_process_writes_its_half_and_nothing_else_is_left(checkpoint: Path) -> None:
    sizes = {file.name: file.stat().st_size for file in checkpoint.iterdir()}
    assert sizes.keys() == {"index.json", "rest.pt", "rank-00000.shards", "rank-00001.shards"}
    tensors = tensors_in(checkpoint)
    weights = {name.partition("/")[2] for name in tensors if name.startswith("state_dict/")}
    assert weights == Net().state_dict().keys()
    nbytes = sum(8 * torch.Size(tensor["shape"]).numel() for tensor in tensors.values())
    assert sizes["rank-00000.shards"] + sizes["rank-00001.shards"] == nbytes
    assert os.listdir(checkpoint.parent) == [checkpoint.name]


class LargestTensor(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that an operation has computed in this process."""

    elements = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if type(leaf) is Tensor and leaf.dtype == torch.float64 and not leaf.is_meta:
                self.elements = max(self.elements, leaf.numel())
        return result


class SavesWithoutGathering(SavesAfter):
    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        with LargestTensor() as largest:
            super().on_train_batch_end(trainer, module, *args)
        largest_shard = max(parameter.to_local().numel() for parameter in module.parameters())
        assert largest.elements <= largest_shard < max(parameter.numel() for parameter in module.parameters())


@pytest.mark.thorough
def test_nothing_is_gathered_for_a_sharded_checkpoint(tmp_path: Path) -> None:
    fit(Net, sharded(), 2, callbacks=[SavesWithoutGathering(tmp_path / "a.ckpt", 0)], max_epochs=1, count=12)
    assert os.listdir(tmp_path) == ["a.ckpt"]


@pytest.mark.thorough
def test_shards_are_merged_into_a_file_with_which_a_run_continues(checkpoint: Path, tmp_path: Path) -> None:
    file = merge_shards(checkpoint, tmp_path / "whole.ckpt")
    content = torch.load(file, weights_only=False)
    assert not any(value.is_meta for value in content["state_dict"].values())
    (copies,) = content["callbacks"].values()
    assert_close(weights_of(make(Net).double()), copies["first"])
    assert_close(content["state_dict"], copies["last"], 0.0)
    module, _ = fit(Net, batch_size=BATCH_SIZE, ckpt_path=file, **WINDOW)
    assert_close(weights_of(fit(Net, **WINDOW)[0]), weights_of(module))
    refuses(lambda: merge_shards(checkpoint, checkpoint), "is the sharded checkpoint itself", error=CheckpointError)
    refuses(lambda: merge_shards(file, tmp_path / "x"), "is whole already", error=CheckpointError)


@pytest.mark.slow
def test_one_replica_writes_and_tied_weights_are_written_once(tmp_path: Path) -> None:
    """Of 4 processes with two replicas, two have the same shards."""
    path = tmp_path / "tied.ckpt"
    fit(Tied, sharded(replicas=2), 4, callbacks=[SavesAfter(path, 3)], max_epochs=1)
    sizes = sorted(file.stat().st_size for file in path.glob("*.shards"))
    assert sizes[:2] == [0, 0]
    assert sizes[2] > 0
    names = [name for name in tensors_in(path) if name.startswith("state_dict/blocks") and "up.weight" in name]
    assert names == [f"state_dict/blocks.{number}.up.weight" for number in (0, 1)]


# With Lightning's ModelCheckpoint.


@pytest.mark.thorough
@pytest.mark.parametrize("behind", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["at once", "behind"])
def test_a_model_checkpoint_keeps_the_best_and_the_last(behind: bool, tmp_path: Path) -> None:
    saves = ModelCheckpoint(
        dirpath=tmp_path, filename="{step}", monitor="step", mode="max", save_last=True, every_n_train_steps=1
    )
    strategy = sharded(save_in_background=behind)
    module, trainer = fit(Net, strategy, 2, callbacks=[saves], enable_checkpointing=True, count=36, max_epochs=1)
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "step=3.ckpt"]
    assert saves.best_model_path == str(tmp_path / "step=3.ckpt")
    for path in ("best", "last"):
        trainer.validate(module, loader(7, 3), ckpt_path=path, verbose=False)
    # Both are checkpoints of the end.
    one, _ = fit(Net, ckpt_path=tmp_path / "last.ckpt", count=36, batch_size=BATCH_SIZE, max_epochs=1)
    assert_close(weights_of(module), weights_of(one), 0.0)


@pytest.mark.thorough
def test_files_and_folders_take_the_place_of_one_another(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    fit(Net, sharded(), 2, callbacks=[SavesAfter(path, 0)], max_epochs=1, count=12)
    assert path.is_dir()
    fit(Net, callbacks=[SavesAfter(path, 0)], max_epochs=1, count=12)
    assert path.is_file()
    assert os.listdir(tmp_path) == ["last.ckpt"]


# What goes wrong.


class FailsAtTheSecond(Callback):
    """Saves twice; the second time the disk of one process is full."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            trainer.save_checkpoint(self.folder / "first.ckpt")
            trainer.strategy.portable.folders.finish()
        if batch_idx == 1:
            if trainer.global_rank == 1:
                saving.write_pieces = self.fail
            trainer.save_checkpoint(self.folder / "second.ckpt")

    def fail(self, path: Path, pieces: Any) -> None:
        raise OSError(28, "No space left on device")


@pytest.mark.thorough
@pytest.mark.parametrize("behind", [False, True], ids=["at once", "behind"])
def test_an_error_of_a_process_that_writes_reaches_the_user(behind: bool, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"second\.ckpt' cannot be written: the disk is full. It needs \d"):
        fit(Net, sharded(save_in_background=behind), 2, callbacks=[FailsAtTheSecond(tmp_path)], max_epochs=1)
    assert os.listdir(tmp_path) == ["first.ckpt"]
    merge_shards(tmp_path / "first.ckpt", tmp_path / "whole.ckpt")


class WritesLater(SavesAfter):
    """Saves after the first step; the writer waits until it is released, at the end of the second step or of the run.

    Args:
        path: The checkpoint.
        error: The class of an error that ends the second step. Default: none does.
    """

    def __init__(self, path: Path, error: type[BaseException] | None = None) -> None:
        super().__init__(path, 0)
        self.error = error

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.released = threading.Event()
            saving.write_pieces = self.write
            super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
        if batch_idx == 1:
            if self.error is not None:
                raise self.error("on purpose")
            self.released.set()

    def write(self, *arguments: Any) -> Any:
        assert self.released.wait(60)
        return pieces.write_pieces(*arguments)

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.released.set()


@pytest.mark.thorough
def test_steps_continue_while_a_checkpoint_is_written_in_the_background(tmp_path: Path) -> None:
    """It holds the weights of the moment at which it was saved."""
    path = tmp_path / "a.ckpt"
    fit(Net, sharded(save_in_background=True), 2, callbacks=[WritesLater(path)], max_epochs=1)
    content = torch.load(merge_shards(path, tmp_path / "whole.ckpt"), weights_only=False)
    assert_close(weights_of(fit(Net, max_steps=1)[0]), content["state_dict"])


@pytest.mark.thorough
@pytest.mark.parametrize("error", [RuntimeError, pytest.param(KeyboardInterrupt, marks=pytest.mark.slow)])
def test_a_checkpoint_in_the_background_is_completed_after_an_error(error: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    with pytest.raises((error, WorkerError)):
        fit(Net, sharded(save_in_background=True), 2, callbacks=[WritesLater(path, error)], max_epochs=1)
    assert os.listdir(tmp_path) == ["a.ckpt"]
    merge_shards(path, tmp_path / "whole.ckpt")


class ComputesWithWeights(Net):
    """Scales the weights that it saves, which have no values."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weights = checkpoint["state_dict"]
        weights["last.bias"] = weights["last.bias"] * 2


@pytest.mark.slow
def test_weights_without_values_that_a_hook_has_changed_are_refused(tmp_path: Path) -> None:
    callbacks = [SavesAfter(tmp_path / "a.ckpt", 0)]
    with pytest.raises(CheckpointError, match=r"\['state_dict'\]\['last.bias'\] has no values"):
        fit(ComputesWithWeights, sharded(), 2, callbacks=callbacks, max_epochs=1, count=12)
    assert os.listdir(tmp_path) == []


def test_options_that_do_not_go_with_sharded_checkpoints_are_refused() -> None:
    refuses(lambda: FSDPStrategy(checkpoints="whole"), "'full' or 'sharded', not 'whole'")  # type: ignore[arg-type]
    refuses(lambda: FSDPStrategy(save_in_background=True), "Add checkpoints='sharded'")
    plugins: Any = [TorchCheckpointIO()]
    refuses(lambda: fit(Net, sharded(), 2, plugins=plugins, count=12), "TorchCheckpointIO writes whole checkpoints")
    options: dict[str, Any] = {"callbacks": [ModelCheckpoint(save_last="link")], "enable_checkpointing": True}
    strategy = sharded(save_in_background=True)
    refuses(lambda: fit(Net, strategy, 2, count=12, **options), "links to a checkpoint that is not complete yet")
