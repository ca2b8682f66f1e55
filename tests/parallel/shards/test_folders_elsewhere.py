"""Folders of shards elsewhere: an index, which is written last, decides which files are the checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from equipoise import CheckpointError, merge_shards
from equipoise.interop.remote.files import RemotePath
from equipoise.parallel.shards.placeholders import make_placeholder
from equipoise.parallel.shards.reading import ShardReader, has_shards
from equipoise.trainer.checkpointing.file import completion_time, remove_checkpoint, write_checkpoint
from equipoise.trainer.checkpointing.file_reading import read_checkpoint
from equipoise.trainer.checkpointing.reading import load_checkpoint
from tests.parallel.shards.folders import save
from tests.support.elsewhere import Elsewhere, url_of
from tests.support.trainer_runs import refuses


def write(path: RemotePath, value: float, count: int = 2) -> None:
    """Write a checkpoint with one tensor of a value in shards."""
    weight = torch.full((4, 3), value, dtype=torch.float64)
    save(path, {"w": weight}, {"state_dict": {"weight": make_placeholder(weight, "w")}}, count)


def value_of(path: RemotePath) -> float:
    weight: Tensor = load_checkpoint(path)["state_dict"]["weight"]
    assert weight.shape == (4, 3)
    return float(weight.unique())


@pytest.fixture
def path(tmp_path: Path) -> RemotePath:
    """A checkpoint elsewhere, of the value 1."""
    path = RemotePath(url_of(tmp_path / "a.ckpt"))
    write(path, 1.0)
    return path


def test_a_sharded_checkpoint_elsewhere_is_read_and_merged(path: RemotePath, tmp_path: Path) -> None:
    assert value_of(path) == 1.0
    assert [piece.unique().item() for piece in ShardReader(path).pieces("w")] == [1.0, 1.0]
    whole = merge_shards(str(path), url_of(tmp_path / "whole.ckpt"))
    assert str(whole) == url_of(tmp_path / "whole.ckpt")
    assert torch.equal(read_checkpoint(whole)["state_dict"]["weight"], torch.ones(4, 3, dtype=torch.float64))
    refuses(lambda: merge_shards(str(path), str(path)), "is the sharded checkpoint itself", error=CheckpointError)
    # What a tool copies to this machine is the same checkpoint.
    assert load_checkpoint(tmp_path / "a.ckpt")["state_dict"]["weight"].sum() == 12


def test_the_next_checkpoint_replaces_the_files(path: RemotePath, tmp_path: Path) -> None:
    """It may have been written by more processes; their files are gone."""
    write(path, 2.0, count=3)
    write(path, 3.0)
    assert value_of(path) == 3.0
    names = sorted(file.name.partition("-")[0] for file in path.iterdir())
    assert names == ["index.json", "rank", "rank", "rest"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.ckpt"]


@pytest.mark.parametrize("name", ["rank-00001", "rest", "index"])
def test_an_earlier_one_survives_a_write_that_fails(
    name: str, path: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(file.name for file in path.iterdir())
    monkeypatch.setattr(Elsewhere, "faulty", name)
    words = "a.ckpt' cannot be written: ConnectionError: the line is dead. Check"
    refuses(lambda: write(path, 2.0), words, error=CheckpointError)
    monkeypatch.undo()
    assert sorted(file.name for file in path.iterdir()) == before
    assert value_of(path) == 1.0
    write(path, 3.0)
    assert value_of(path) == 3.0


@pytest.mark.parametrize("name", ["rank-00001", "index"])
def test_what_is_not_complete_is_no_checkpoint(name: str, path: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed leaves a folder without an index, or the earlier index."""
    new = path.with_name("b.ckpt")
    for target in (new, path):
        # Nobody tidies up.
        monkeypatch.setattr("equipoise.parallel.shards.folder.RemoteFolder.discard", lambda self: None)
        monkeypatch.setattr(Elsewhere, "faulty", name)
        with pytest.raises(CheckpointError):
            write(target, 2.0)
        monkeypatch.undo()
    assert has_shards(new)
    assert completion_time(new) is None
    refuses(lambda: load_checkpoint(new), "without 'index.json'", "was killed", error=CheckpointError)
    assert value_of(path) == 1.0
    # The next writer takes the folder, and leaves nothing of the killed one.
    for target in (new, path):
        write(target, 4.0)
        assert value_of(target) == 4.0
        assert len(list(target.iterdir())) == 4


def test_an_index_that_was_written_is_the_checkpoint(path: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line breaks when the index is there already: its files stay."""
    write_bytes = RemotePath.write_bytes

    def write_and_fail(self: RemotePath, data: bytes) -> int:
        write_bytes(self, data)
        if self.name == "index.json":
            raise ConnectionError("the answer is lost")
        return len(data)

    monkeypatch.setattr(RemotePath, "write_bytes", write_and_fail)
    with pytest.raises(CheckpointError, match="the answer is lost"):
        write(path, 2.0)
    assert value_of(path) == 2.0


def test_nothing_is_removed_where_the_index_cannot_be_read(path: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows then which files belong to the checkpoint."""

    def fail(self: RemotePath) -> bytes:
        raise ConnectionError("the line is dead")

    monkeypatch.setattr(RemotePath, "read_bytes", fail)
    write(path, 2.0)
    assert len(list(path.iterdir())) == 7
    monkeypatch.undo()
    assert value_of(path) == 2.0


def test_a_file_of_a_sharded_checkpoint_is_refused(path: RemotePath) -> None:
    rest = next(file for file in path.iterdir() if file.name.startswith("rest"))
    refuses(lambda: load_checkpoint(rest), "is a part of a sharded checkpoint", error=CheckpointError)


@pytest.mark.parametrize("names", [["rest-0123abcd.pt", "rest.pt"], [], ["rest-../x.pt"]])
def test_an_index_has_one_rest(names: list[str], path: RemotePath) -> None:
    from equipoise.parallel.shards.index import _check_sum

    outer = json.loads((path / "index.json").read_bytes())
    files = outer["content"]["files"]
    (rest,) = [name for name in files if name.startswith("rest")]
    entry = files.pop(rest)
    files.update(dict.fromkeys(names, entry))
    outer["crc32"] = _check_sum(outer["content"])
    (path / "index.json").write_text(json.dumps(outer))
    refuses(lambda: ShardReader(path), "its index", error=CheckpointError)


def test_a_sharded_checkpoint_elsewhere_is_removed(path: RemotePath, tmp_path: Path) -> None:
    remove_checkpoint(path)
    remove_checkpoint(path)
    assert not path.exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["rank-00000", "index"])
def test_files_and_folders_take_the_place_of_one_another(
    name: str, path: RemotePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole: dict[str, Any] = {"state_dict": {"weight": torch.full((4, 3), 5.0)}}
    write_checkpoint(whole, path)
    assert path.is_file()
    # What a killed process has left.
    path.with_name("a.ckpt.replaced").write_bytes(b"")
    monkeypatch.setattr(Elsewhere, "faulty", name)
    with pytest.raises(CheckpointError):
        write(path, 2.0)
    assert value_of(path) == 5.0
    monkeypatch.undo()
    write(path, 6.0)
    assert value_of(path) == 6.0
    monkeypatch.setattr(Elsewhere, "faulty", "a.ckpt")
    with pytest.raises(ConnectionError):
        write_checkpoint(whole, path)
    monkeypatch.undo()
    assert value_of(path) == 6.0
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.ckpt"]


def test_a_whole_one_returns_where_folders_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is moved to the name of a folder goes into it."""
    path = RemotePath("memory://whole/a.ckpt")
    path.write_bytes(b"1")

    def fail(*args: Any) -> None:
        raise ConnectionError("the line is dead")

    monkeypatch.setattr("equipoise.extensions.fsdp.state.writing.saving.write_pieces", fail)
    try:
        with pytest.raises(CheckpointError, match="the line is dead"):
            write(path, 2.0)
        assert path.is_file()
        assert list(path.parent.iterdir()) == [path]
    finally:
        path.parent.remove()


def test_an_incomplete_one_is_not_put_aside(path: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process was killed while the only complete one lay there."""
    aside = path.with_name("a.ckpt.replaced")
    path.rename(aside)
    (path / "rank-00000-0123abcd.shards").write_bytes(b"1")
    monkeypatch.setattr(Elsewhere, "faulty", r"a\.ckpt")
    with pytest.raises(ConnectionError):
        write_checkpoint({"state_dict": {}}, path)
    monkeypatch.undo()
    assert value_of(aside) == 1.0


def test_a_folder_with_other_files_is_not_replaced_aside(path: RemotePath) -> None:
    notes = path.with_name("a.ckpt.replaced") / "notes.txt"
    notes.write_text("mine")
    refuses(lambda: write_checkpoint({"state_dict": {}}, path), "belong to no checkpoint", error=CheckpointError)
    assert notes.read_text() == "mine"
    assert value_of(path) == 1.0


def test_other_folders_are_not_replaced(tmp_path: Path) -> None:
    path = RemotePath(url_of(tmp_path / "mine"))
    (path / "notes.txt").write_text("mine")
    for write_there in (lambda: write(path, 1.0), lambda: write_checkpoint({"state_dict": {}}, path)):
        refuses(write_there, "files that belong to no checkpoint", error=CheckpointError)
    assert (path / "notes.txt").read_text() == "mine"
