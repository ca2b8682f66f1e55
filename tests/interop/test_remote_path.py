"""Paths elsewhere have the methods of `pathlib.Path`: what they say is what it says of the same files here."""

import pickle
from pathlib import Path
from typing import Any

import pytest
from fsspec import AbstractFileSystem

from equipoise.interop.remote.files import RemotePath
from equipoise.interop.remote.paths import AnyPath, is_remote, to_path
from equipoise.trainer.checkpointing.file import completion_time, remove_checkpoint
from tests.support.elsewhere import Elsewhere, url_of
from tests.support.trainer_runs import refuses


@pytest.fixture(params=["here", "mock", "memory"])
def folder(request: pytest.FixtureRequest, memory_files: Any, tmp_path: Path) -> AnyPath:
    """A folder of each kind."""
    return {"here": tmp_path, "mock": RemotePath(url_of(tmp_path)), "memory": RemotePath("memory://run")}[request.param]


def test_files_are_written_read_and_listed(folder: AnyPath) -> None:
    inner = folder / "a" / "b"
    inner.mkdir(parents=True, exist_ok=True)
    file = inner / "x.tar.txt"
    assert file.write_text("größe", encoding="utf-8") in (5, 7)
    assert (file.name, file.stem, file.suffix) == ("x.tar.txt", "x.tar", ".txt")
    assert file.read_text(encoding="utf-8") == "größe"
    assert file.read_bytes() == "größe".encode()
    with file.open("r", encoding="utf-8", newline="") as content:
        assert content.read() == "größe"
    assert file.stat().st_size == 7
    assert abs(file.stat().st_mtime_ns - (file.stat().st_mtime_ns // 10**9) * 10**9) < 10**9
    assert (file.exists(), file.is_file(), file.is_dir()) == (True, True, False)
    assert (inner.exists(), inner.is_file(), inner.is_dir()) == (True, False, True)
    assert file.parent == inner
    assert folder in file.parents
    assert [path.name for path in inner.iterdir()] == ["x.tar.txt"]
    assert list(folder.glob("**/*.txt")) == list((folder / "a").glob("**/x*")) == [file]


def test_files_are_renamed_and_removed(folder: AnyPath) -> None:
    file = folder / "x"
    file.write_bytes(b"1")
    other = file.with_name("y")
    assert file.rename(other) == other
    assert (file.exists(), other.read_bytes()) == (False, b"1")
    other.unlink()
    other.unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError):
        other.unlink()
    assert not other.exists()


def test_a_name_with_brackets_is_no_pattern(memory_files: Any) -> None:
    """One of brackets is removed, and not those that it would match."""
    folder = RemotePath("memory://run")
    for name in ("x[12]", "x1", "y*/a", "yz/a"):
        (folder / name).write_bytes(b"1")
    remove_checkpoint(folder / "x[12]")
    remove_checkpoint(folder / "y*")
    assert memory_files.find("/run") == ["/run/x1", "/run/yz/a"]
    assert not (folder / "y*").exists()


def test_a_file_system_without_times(memory_files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(memory_files), "modified", AbstractFileSystem.modified)
    file = RemotePath("memory://run/x")
    assert completion_time(file) is None
    file.write_bytes(b"1")
    assert completion_time(file) == 0


def test_a_write_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RemotePath(url_of(tmp_path)) / "x"
    file.write_bytes(b"before")
    monkeypatch.setattr(Elsewhere, "faulty", "x")
    with pytest.raises(ConnectionError):
        file.write_bytes(b"after that")
    assert file.read_bytes() == b"before"


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("x/last.ckpt", Path("x/last.ckpt")),
        ("file:///x/last.ckpt", Path("/x/last.ckpt")),
        ("s3://bucket/run/", RemotePath("s3://bucket/run")),
        ("simplecache::s3://bucket/run", RemotePath("simplecache::s3://bucket/run")),
        (RemotePath("s3://bucket"), RemotePath("s3://bucket")),
        ("C:/run", Path("C:/run")),
        ("/data/mine:/run", Path("/data/mine:/run")),
    ],
)
def test_urls_are_told_from_paths_of_this_machine(path: Any, kind: AnyPath) -> None:
    assert to_path(path) == kind
    assert is_remote(path) == isinstance(kind, RemotePath)


@pytest.mark.parametrize("path", [Path("s3://bucket/run"), "/home/me/gs:/bucket"])
def test_a_url_that_pathlib_has_changed(path: Any) -> None:
    """It would be a folder of that name on this machine."""
    refuses(lambda: to_path(path), "was a URL", "Pass it as text", "://...'")


def test_an_unknown_protocol_is_refused() -> None:
    refuses(lambda: RemotePath("nowhere://x").exists(), "'nowhere://x' cannot be used: Protocol not known: nowhere")


def test_a_web_server_has_no_folders() -> None:
    """To ask would be to read a checkpoint as a page."""
    assert not RemotePath("https://unknown.invalid/x.ckpt").is_dir()


def test_paths_are_values() -> None:
    path = RemotePath("s3://bucket/a")
    assert pickle.loads(pickle.dumps(path)) == path
    assert len({path, RemotePath("s3://bucket/a/"), path / "b"}) == 2
    assert path.parent == RemotePath("s3://bucket")
    assert path.parents == [RemotePath("s3://bucket"), RemotePath("s3://")]
    assert repr(path) == "RemotePath('s3://bucket/a')"
