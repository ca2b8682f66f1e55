"""Contents of checkpoints that are neither plain data nor objects: arrays of all kinds, deep and wide nesting."""

import pickle
import tracemalloc
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback

from equipoise import CheckpointError, Trainer
from equipoise.safe_loading.stand_in import StandIn
from equipoise.safe_loading.stand_in_search import stand_ins_in
from equipoise.trainer.checkpointing.file_reading import open_checkpoint, read_checkpoint
from tests.support.trainer_runs import Small, loader, trainer

FIELDS = [("name", "i4"), ("value", "f8")]


class Remembering(Callback):
    """Has a state of any kind."""

    def __init__(self, kept: Any = None) -> None:
        self.kept = kept

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept = state_dict["kept"]


def resumed(kept: Any, folder: Path) -> Any:
    """Return what a callback gets back from a checkpoint, with which a run continues."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*objects that")
        run = trainer(Trainer, callbacks=Remembering(kept))
        run.fit(Small(), loader())
        path = folder / "x.ckpt"
        run.save_checkpoint(path)
        callback = Remembering()
        trainer(Trainer, max_epochs=2, callbacks=callback).fit(Small(), loader(), ckpt_path=path)
    return callback.kept


@pytest.mark.parametrize(
    "array",
    [
        np.arange(3, dtype=">i4"),
        np.array(["ab", "c"], dtype=">U3"),
        np.array(["2020-01-31", "NaT"], dtype="M8[D]"),
        np.array([1, 2], dtype=">m8[3s]"),
        np.datetime64("2020-01-31"),
        np.array([[1, None], ["a", 2]], dtype=object, order="F"),
        np.zeros((0, 3), dtype=object),
    ],
    ids=lambda array: f"{array.dtype.str}{array.shape}",
)
def test_arrays_come_back_as_they_were(array: Any, tmp_path: Path) -> None:
    read = resumed(array, tmp_path)
    by_pickle = pickle.loads(pickle.dumps(array))  # which changes the byte order
    assert (read.dtype, read.shape) == (by_pickle.dtype, by_pickle.shape)
    assert str(read.tolist()) == str(array.tolist())
    assert np.dtype("i4").byteorder == "="


class Derived(np.ndarray):
    """Has a class of its own, as matrices have."""


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (np.zeros(3, dtype=FIELDS), "numpy.ndarray"),
        (np.ones(2).view(Derived), f"{__name__}.Derived"),
        (np.dtype(FIELDS), "numpy.dtype"),
        (np.zeros(3, dtype=FIELDS).view(np.recarray), "recarray"),
    ],
    ids=["fields", "derived", "dtype", "records"],
)
def test_other_things_of_numpy_become_stand_ins(value: Any, name: str, tmp_path: Path) -> None:
    """The rest of the file can be read."""
    (found,) = stand_ins_in([resumed(value, tmp_path)]).values()
    assert found.endswith(name)


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_a_quantised_tensor_becomes_a_stand_in(tmp_path: Path) -> None:
    tensor = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    torch.save({"state_dict": {"weight": torch.ones(2)}, "mine": tensor}, tmp_path / "x.ckpt")
    read = read_checkpoint(tmp_path / "x.ckpt")
    assert torch.equal(read["state_dict"]["weight"], torch.ones(2))
    assert isinstance(read["mine"], StandIn)


class Made:
    """Is made by a call that no checkpoint may hold."""

    def __reduce__(self) -> Any:
        return torch.Tensor, ()


def test_what_cannot_be_read_back_does_not_end_the_training(tmp_path: Path) -> None:
    run = trainer(Trainer, callbacks=Remembering(Made()))
    run.fit(Small(), loader())
    with pytest.warns(UserWarning, match=r"with weights_only=False alone: it calls <class 'torch.Tensor'>"):
        run.save_checkpoint(tmp_path / "x.ckpt")
    assert torch.load(tmp_path / "x.ckpt", weights_only=False)["state_dict"]


# Hostile contents


def with_pickle(folder: Path, content: bytes) -> Path:
    """Write a checkpoint whose entry "mine" is what the content of a pickle leaves on the stack."""
    torch.save({"state_dict": {}}, folder / "usual.ckpt")
    whole = b"\x80\x02}(X\x0a\x00\x00\x00state_dict}X\x04\x00\x00\x00mine" + content + b"u."
    path = folder / "unusual.ckpt"
    with zipfile.ZipFile(folder / "usual.ckpt") as usual, zipfile.ZipFile(path, "w") as unusual:
        for name in usual.namelist():
            unusual.writestr(name, whole if name.endswith("data.pkl") else usual.read(name))
    return path


DEPTH = 5_000


@pytest.mark.parametrize(
    "content",
    [
        b"]" * DEPTH + b"a" * (DEPTH - 1),  # lists in lists
        b"}X" + DEPTH.to_bytes(4, "little") + b"k" * DEPTH + b"](" + b"K\x01" * DEPTH + b"es",  # under a long key
    ],
    ids=["deep", "long"],
)
def test_the_search_for_objects_takes_memory_as_the_file_does(content: bytes, tmp_path: Path) -> None:
    checkpoint = read_checkpoint(with_pickle(tmp_path, content))
    tracemalloc.start()
    stand_ins_in(checkpoint)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1000 * DEPTH


@pytest.mark.parametrize(
    "container",
    [b"}h\x01K\x01s", b"(h\x01\x91"],
    ids=["dictionary", "frozen set"],
)
def test_a_key_is_looked_at_for_a_short_time_only(container: bytes, tmp_path: Path) -> None:
    path = with_pickle(tmp_path, b")" + b"\x85" * 5000 + b"q\x010" + container)
    with pytest.raises(CheckpointError, match="nested too deeply"):
        read_checkpoint(path)


def test_tensors_are_read_on_the_cpu_whatever_the_default_device_is(tmp_path: Path) -> None:
    saved = torch.arange(6.0).view(2, 3).t()
    torch.save({"state_dict": {"weight": saved}}, tmp_path / "x.ckpt")
    with torch.device("meta"), open_checkpoint(tmp_path / "x.ckpt") as archive:
        read = read_checkpoint(tmp_path / "x.ckpt")["state_dict"]["weight"]
        (piece,) = archive.pieces_of(archive.content["state_dict"]["weight"])
    assert torch.equal(read, saved)
    assert torch.equal(piece, saved.reshape(-1))


def test_sparse_tensors_are_read_on_the_cpu_whatever_the_default_device_is(tmp_path: Path) -> None:
    torch.save({"state_dict": {"weight": torch.eye(3).to_sparse()}}, tmp_path / "x.ckpt")
    with torch.device("meta"):
        read = read_checkpoint(tmp_path / "x.ckpt")["state_dict"]["weight"]
    assert torch.equal(read.to_dense(), torch.eye(3))


def test_a_negated_tensor_is_not_larger_than_its_storage(tmp_path: Path) -> None:
    """Negating copies it, and its stride may be 0."""
    tensor = torch.zeros(1).expand(1 << 20)._neg_view()
    torch.save({"state_dict": {"weight": tensor}}, tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match="negated tensor of shape"):
        read_checkpoint(tmp_path / "x.ckpt")


def test_places_of_objects_are_short() -> None:
    value: Any = StandIn("somewhere", "Thing")
    for _ in range(50):
        value = [value]
    (place,) = stand_ins_in(value)
    assert place == "[Ellipsis]" + "[0]" * 20
    assert len(stand_ins_in([StandIn("somewhere", "Thing")] * 2000)) == 1000
