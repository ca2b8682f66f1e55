"""Folders of shards: what was written is read, in any pieces; what is torn or tampered with is an error."""

import json
import os
import pickle
import random
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from equipoise import CheckpointError
from equipoise.parallel.shards import folder as folder_module
from equipoise.parallel.shards.folder import remove_folder
from equipoise.parallel.shards.placeholders import make_placeholder
from equipoise.parallel.shards.reading import ShardReader
from equipoise.trainer.checkpointing.reading import load_checkpoint
from tests.parallel.shards.folders import save
from tests.support.equality import assert_equal
from tests.support.hostile_objects import Runs
from tests.support.trainer_runs import refuses

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8)


def test_shards_of_any_number_of_processes_are_read_whole(tmp_path: Path) -> None:
    """Of tensors of several dtypes and shapes; some have fewer rows than there are processes."""
    shapes = [(5, 3), (2,), (4, 1), (0, 2), (3, 2, 2), (1,), (6,)]
    tensors = {
        f"{number}/ö": torch.randint(0, 2, shape).to(dtype)
        for number, (dtype, shape) in enumerate(zip(DTYPES, shapes, strict=True))
    }
    for count in (1, 3, 5):
        path = tmp_path / f"{count}.ckpt"
        save(path, tensors, {"state_dict": {}}, count)
        reader = ShardReader(path)
        assert_equal(tensors, {name: reader.whole(name) for name in reader.tensors})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A small checkpoint, with a tensor in shards."""
    weight = torch.arange(12, dtype=torch.float64).reshape(4, 3)
    rest = {"state_dict": {"weight": make_placeholder(weight, "w")}, "pair": (1, [2])}
    save(tmp_path / "a.ckpt", {"w": weight}, rest)
    return tmp_path / "a.ckpt"


def test_another_checkpoint_takes_the_place_of_a_folder(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for exchanges in (True, False):
        if not exchanges:
            monkeypatch.setattr(folder_module, "_exchange", lambda first, second: False)
        save(path, {"w": torch.full((2, 2), 7.0)}, {"state_dict": {}}, 3)
        assert ShardReader(path).whole("w").tolist() == [[7, 7], [7, 7]]
        assert os.listdir(path.parent) == [path.name]


def test_a_folder_loses_its_name_before_its_files(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(folder_module.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        remove_folder(path)
    monkeypatch.undo()
    assert not path.exists()
    # The next checkpoint clears what is left.
    save(path, {}, {"state_dict": {}})
    assert os.listdir(path.parent) == [path.name]


def test_a_folder_is_removed_where_there_are_no_locks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows, where no folder can be opened, and none be renamed to the name of another."""
    monkeypatch.setattr(folder_module, "HAS_LOCKS", False)
    monkeypatch.setattr(folder_module, "create_locked_folder", None)
    remove_folder(path)
    assert os.listdir(path.parent) == []


def test_an_earlier_one_stays_where_names_cannot_be_exchanged(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any moment there is a whole one, also if the second of two steps fails, or the process is killed before it."""
    monkeypatch.setattr(folder_module, "_exchange", lambda first, second: False)
    rename = Path.rename
    earlier = path.with_name("a.ckpt.replaced")

    def failing(self: Path, target: Any) -> Path:
        if self.suffix == ".part":
            assert ShardReader(earlier).whole("w").sum() == 66
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    refuses(lambda: save(path, {"w": torch.ones(2)}, {"state_dict": {}}), "Input/output", error=CheckpointError)
    assert os.listdir(path.parent) == [path.name]
    assert ShardReader(path).whole("w").sum() == 66

    # Killed: the next two find it under its other name.
    monkeypatch.setattr(Path, "rename", rename)
    path.rename(earlier)
    save(path, {"w": torch.ones(2)}, {"state_dict": {}})
    assert ShardReader(earlier).whole("w").sum() == 66
    save(path, {"w": torch.ones(3)}, {"state_dict": {}})
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("name", ["index.json", "notes.txt"])
def test_folders_with_other_files_are_not_replaced(name: str, path: Path) -> None:
    own = path.with_name("site")
    own.mkdir()
    (own / name).write_text("mine")
    (own / "page.html").write_text("mine")
    (path / "notes.txt").write_text("mine")
    for folder in (own, path):
        refuses(partial(save, folder, {}, {"state_dict": {}}), "belong to no checkpoint", error=CheckpointError)
    assert (own / "page.html").read_text() == (path / "notes.txt").read_text() == "mine"


def test_a_file_of_a_sharded_checkpoint_is_no_checkpoint(path: Path) -> None:
    refuses(lambda: load_checkpoint(path / "rest.pt"), "Pass the folder", error=CheckpointError)


# Damage.


def edit_index(path: Path, change: Callable[[dict[str, Any]], Any], *, sign: bool = True) -> None:
    file = path / "index.json"
    outer = json.loads(file.read_text())
    change(outer["content"])
    if sign:
        outer["crc32"] = zlib.crc32(json.dumps(outer["content"], sort_keys=True).encode())
    file.write_text(json.dumps(outer))


def chunk(content: dict[str, Any]) -> dict[str, Any]:
    return content["tensors"]["w"]["chunks"][1]


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "of another format": lambda content: content.update(format="other"),
    "has the version 2": lambda content: content.update(version=2),
    "order of bytes": lambda content: content.update(byte_order="big"),
    "names a file '../x'": lambda content: content["files"].update({"../x": {"size": 0, "crc32": 0}}),
    "lacks 'rest.pt'": lambda content: content["files"].pop("rest.pt"),
    "names a dtype": lambda content: content["tensors"]["w"].update(dtype="Tensor"),
    "lacks shards of 'w'": lambda content: content["tensors"]["w"]["chunks"].pop(),
    "has some of them twice": lambda content: chunk(content).update(offsets=[0, 0]),
    "outside of the tensor": lambda content: chunk(content).update(offsets=[3, 0]),
    "that it does not list": lambda content: chunk(content).update(file="rank-00007.shards"),
    "overlap, or lie outside": lambda content: chunk(content).update(begin=8),
    "is missing, or of another type": lambda content: chunk(content).update(begin=True),
    "'begin' is -1": lambda content: chunk(content).update(begin=-1),
    "no count": lambda content: chunk(content).update(sizes=[2, 3.0]),
    "shape": lambda content: content["tensors"]["w"].update(shape=[2**70]),
    "a dtype 'qint8'": lambda content: content["tensors"]["w"].update(dtype="qint8"),
    "a shape of 'w'": lambda content: content["tensors"]["w"].update(shape=[0, 2**40, 2**40], chunks=[]),
    "that no tensor has": lambda content: content["tensors"]["w"].update(shape=[0] * 65, chunks=[]),
    "lacks the file 'rank-00002.shards'": lambda content: content["files"].update(
        {"rank-00002.shards": {"size": 0, "crc32": 0}}
    ),
    "has 48 bytes, not 49": lambda content: content["files"]["rank-00000.shards"].update(size=49),
    "'rest.pt' in it is not what": lambda content: content["files"]["rest.pt"].update(crc32=1),
}


@pytest.mark.parametrize("message", CHANGES)
def test_a_tampered_index_is_refused(message: str, path: Path) -> None:
    edit_index(path, CHANGES[message])
    refuses(lambda: load_checkpoint(path), "a.ckpt", message, error=CheckpointError)


def test_an_index_with_another_check_sum_is_refused(path: Path) -> None:
    edit_index(path, lambda content: content["tensors"]["w"]["chunks"].reverse(), sign=False)
    refuses(lambda: load_checkpoint(path), "its index is not what was written", error=CheckpointError)


@pytest.mark.parametrize("content", [b"", b"\xff", b'{"content": 1}'])
def test_a_damaged_index_is_refused(content: bytes, path: Path) -> None:
    (path / "index.json").write_bytes(content)
    refuses(lambda: load_checkpoint(path), "its index is damaged", error=CheckpointError)


def test_an_index_that_is_nested_deeply(path: Path) -> None:
    """Reading, comparing and printing each have a limit."""
    for depth in (*range(700, 1000, 5), 5_000):
        nested = b"[" * depth + b"]" * depth
        for content in (b'{"content": %b}', b'{"content": {"format": %b}}', b'{"content": {"x": %b}, "crc32": 1}'):
            (path / "index.json").write_bytes(content % nested)
            refuses(lambda: load_checkpoint(path), "cannot be read: its index", error=CheckpointError)


def test_a_changed_shard_is_refused(path: Path) -> None:
    file = path / "rank-00001.shards"
    data = bytearray(file.read_bytes())
    data[random.randrange(len(data))] ^= 1
    file.write_bytes(data)
    refuses(lambda: load_checkpoint(path), "a shard of 'w' in 'rank-00001.shards' is not what", error=CheckpointError)


def test_shards_of_another_shape_are_refused(tmp_path: Path) -> None:
    rest = {"state_dict": {"weight": make_placeholder(torch.ones(4), "w")}}
    save(tmp_path / "a.ckpt", {"w": torch.ones(5)}, rest)
    refuses(lambda: load_checkpoint(tmp_path / "a.ckpt"), "its shards are not those of 'w'", error=CheckpointError)


@pytest.mark.parametrize("name", ["index.json", "rest.pt", "rank-00000.shards"])
def test_a_folder_that_lacks_a_file_is_refused(name: str, path: Path) -> None:
    (path / name).unlink()
    refuses(lambda: load_checkpoint(path), name, error=CheckpointError)


def test_no_code_of_a_sharded_checkpoint_is_run_unless_asked(tmp_path: Path) -> None:
    """Neither torch's index, which is a pickle, nor an object in the file beside the shards."""
    ran = tmp_path / "ran"
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / ".metadata").write_bytes(pickle.dumps(Runs(ran)))
    refuses(lambda: load_checkpoint(foreign), "index is a pickle and could run code", error=CheckpointError)
    save(tmp_path / "a.ckpt", {"w": torch.ones(2)}, {"state_dict": {}, "x": Runs(ran)})
    with pytest.warns(UserWarning, match="objects that were not created"):
        load_checkpoint(tmp_path / "a.ckpt")
    assert not ran.exists()
    with pytest.warns(UserWarning, match="is run. Do so only with files that you trust"):
        load_checkpoint(tmp_path / "a.ckpt", weights_only=False)
    assert ran.exists()
