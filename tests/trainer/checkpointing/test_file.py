"""Files: written at once or not at all, by processes that may be killed, on disks that may be full."""

import errno
import io
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from equipoise import CheckpointError, DDPStrategy
from equipoise.trainer.checkpointing.file import write_checkpoint
from equipoise.trainer.checkpointing.file_reading import read_checkpoint
from tests.support.equality import assert_equal
from tests.support.programs import Program
from tests.support.trainer_runs import Small, loader, trainer


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Path]:
    """A file that stays as it is, with nothing beside it, whatever fails."""
    path = tmp_path / "x.ckpt"
    write_checkpoint({"state_dict": {"a": torch.ones(2)}}, path)
    before = path.read_bytes()
    yield path
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["x.ckpt"]


# Writing


def test_what_is_written_is_read(tmp_path: Path) -> None:
    content = {"state_dict": {"a": torch.arange(3)}, "more": [1, "two", None, 3.5, True]}
    path = tmp_path / "new" / "folder" / "x.ckpt"
    write_checkpoint(content, path)
    assert_equal(content, read_checkpoint(path))
    assert os.listdir(path.parent) == ["x.ckpt"]
    write_checkpoint({**content, "more": []}, str(path))
    assert read_checkpoint(path)["more"] == []


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)], ids=oct)
def test_permissions_follow_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    path = tmp_path / "x.ckpt"
    before = os.umask(umask)
    try:
        write_checkpoint({"state_dict": {}}, path)
        (tmp_path / "plain").touch()
    finally:
        after = os.umask(before)
    assert after == umask
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode) == mode


def failing(number: int) -> Any:
    """A function that fails as those of the system do."""

    def fail(*arguments: Any, **options: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_file_system_without_permissions_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "chmod", failing(errno.EPERM))
    path = tmp_path / "x.ckpt"
    write_checkpoint({"state_dict": {}}, path)
    assert read_checkpoint(path) == {"state_dict": {}}


def test_a_failure_leaves_the_old_file_and_nothing_else(kept: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'callbacks'\['mine'\]\[1\], a function, cannot be pickled.*ignore="):
        write_checkpoint({"state_dict": {}, "callbacks": {"mine": [1, lambda: None]}}, kept)


def test_an_interrupt_leaves_the_old_file_and_nothing_else(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = kept.read_bytes()

    def interrupted(handle: int) -> None:
        assert kept.read_bytes() == before
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint({"state_dict": {"a": torch.zeros(2)}}, kept)


WRITER = """
import io, os, sys, torch
from equipoise.trainer.checkpointing.file import write_checkpoint

class Stopping(io.BufferedWriter):
    def write(self, data):
        written = super().write(data)
        self.flush()
        if self.tell() > 50_000:
            print("now", flush=True)
            sys.stdin.read()
        return written

os.fdopen = lambda handle, mode: Stopping(io.FileIO(handle, "w"))
write_checkpoint({"state_dict": {name: torch.zeros(2_500) for name in "abcdefghij"}}, sys.argv[1])
"""


def test_a_killed_writer_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    write_checkpoint({"state_dict": {"a": torch.ones(2)}}, path)
    before = path.read_bytes()
    with Program(WRITER, str(path)) as writer:
        assert writer.stdout.readline() == "now\n"
        writer.kill()
    assert path.read_bytes() == before
    (left,) = set(os.listdir(tmp_path)) - {"x.ckpt"}
    assert left.startswith(".x.ckpt.")
    assert left.endswith(".part")
    assert 50_000 < (tmp_path / left).stat().st_size < 100_000
    assert list(tmp_path.glob("*.ckpt")) == [path]
    write_checkpoint({"state_dict": {"a": torch.zeros(2)}}, path)
    assert not read_checkpoint(path)["state_dict"]["a"].any()
    assert os.listdir(tmp_path) == ["x.ckpt"]  # the remains are cleared


# What others leave


HOLDER = """
import sys, torch
from equipoise.parallel.shards import atomic_file
from pathlib import Path

def write(file):
    file.write(b"half")
    file.flush()
    print("now", flush=True)
    sys.stdin.read()

atomic_file.write_atomically(Path(sys.argv[1]), write)
"""


@contextmanager
def holder(path: Path) -> Iterator[Program]:
    """A process in the midst of writing to a path."""
    with Program(HOLDER, str(path)) as program:
        assert program.stdout.readline() == "now\n"
        yield program


def test_only_what_killed_writers_left_is_cleared(tmp_path: Path) -> None:
    with holder(tmp_path / "busy.ckpt") as busy:
        (unfinished,) = os.listdir(tmp_path)
        with holder(tmp_path / "killed.ckpt") as killed:
            killed.kill()
        (remains,) = set(os.listdir(tmp_path)) - {unfinished}
        machine = remains.split(".")[-2].split("-")[0]
        kept = [".x.ckpt.abcdefgh.part", remains.replace(machine, "00000000"), "mine.part", ".x.part"]
        for name in kept:
            (tmp_path / name).write_text("not ours, or of another machine")
        (tmp_path / "folder").mkdir()
        os.symlink("mine.part", tmp_path / remains.replace("killed", "linked"))
        before = set(os.listdir(tmp_path))
        write_checkpoint({"state_dict": {}}, tmp_path / "new.ckpt")
        assert before - set(os.listdir(tmp_path)) == {remains}
        busy.finish()
    assert (tmp_path / "busy.ckpt").read_bytes() == b"half"
    assert set(kept) < set(os.listdir(tmp_path))


def test_too_many_open_files_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "mkstemp", failing(errno.EMFILE))
    with pytest.raises(CheckpointError, match=r"x\.ckpt' cannot be written: .*ulimit -n.*set_sharing_strategy"):
        write_checkpoint({"state_dict": {}}, tmp_path / "x.ckpt")


@pytest.mark.parametrize(
    ("number", "moment", "words"),
    [
        (errno.ENOSPC, "while writing", "the disk is full"),
        (errno.ENOSPC, "in fsync", "the disk is full"),
        (errno.EFBIG, "while writing", r"the file is larger than this process may write \(`ulimit -f`\)"),
    ],
)
def test_a_full_disk_or_a_file_beyond_the_limit_is_an_error_that_leaves_the_old_file(
    kept: Path, monkeypatch: pytest.MonkeyPatch, number: int, moment: str, words: str
) -> None:
    full = failing(number)

    class Full(io.BufferedWriter):
        def write(self, data: Any) -> int:
            if moment == "while writing" and self.tell() > 10_000:
                full()
            return super().write(data)

    monkeypatch.setattr(os, "fdopen", lambda handle, mode: Full(io.FileIO(handle, "w")))
    monkeypatch.setattr(os, "fsync", full if moment == "in fsync" else lambda handle: None)
    with pytest.raises(CheckpointError) as caught:
        write_checkpoint({"state_dict": {"a": torch.zeros(25_000)}}, kept)
    monkeypatch.undo()
    needed = re.search(rf"{words}\. It needs ([\d,]+) bytes, and [\d,]+ bytes are free", str(caught.value))
    assert needed is not None, str(caught.value)
    assert 100_000 < int(needed[1].replace(",", "")) < 102_000
    assert str(kept) in str(caught.value)


def test_a_full_disk_without_place_for_the_folder_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "mkdir", failing(errno.ENOSPC))
    with pytest.raises(CheckpointError, match=r"x\.ckpt' cannot be written: the disk is full\. [\d,]+ bytes are free"):
        write_checkpoint({"state_dict": {}}, tmp_path / "new" / "x.ckpt")
    assert os.listdir(tmp_path) == []


def test_a_file_that_is_replaced_hands_on_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    write_checkpoint({"state_dict": {}}, path)
    path.chmod(0o600)
    write_checkpoint({"state_dict": {}, "more": 1}, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


# In several processes


class Saves(L.Callback):
    """Saves where a file lies in place of the folder, goes on, and writes the errors of all processes."""

    def __init__(self, path: Path, report: Path) -> None:
        self.path = path
        self.report = report

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        begin = time.monotonic()
        with pytest.raises((CheckpointError, OSError)) as caught:
            trainer.save_checkpoint(self.path)
        assert time.monotonic() - begin < 60.0
        seen = trainer.strategy.processes.gather_objects(f"{caught.type.__name__}: {caught.value}")
        if trainer.is_global_zero:
            self.report.write_text("\n".join(seen))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["x.ckpt", "x.safetensors"])
def test_all_processes_learn_that_the_main_process_cannot_write(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    saves = Saves(tmp_path / "file" / name, tmp_path / "seen")
    run = trainer(strategy=DDPStrategy(timeout=120.0), devices=2, callbacks=[saves])
    run.fit(Small(), loader(4))
    assert run.state.finished
    first, second = (tmp_path / "seen").read_text().splitlines()
    assert first.startswith(("FileExistsError: ", "NotADirectoryError: "))
    assert second == f"CheckpointError: The main process could not write a checkpoint. {first}"
