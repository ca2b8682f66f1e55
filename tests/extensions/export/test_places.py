"""An export is complete or absent: on this machine and elsewhere, after errors, interrupts and a second run."""

import errno
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from equipoise import CheckpointError, Trainer
from equipoise.extensions.export import export_weights, layout, read_weights
from tests.extensions.export.modules import assert_same
from tests.support.pairs import pairwise
from tests.support.programs import Program
from tests.support.trainer_runs import Small, loader, refuses, trainer

OUTS = ["x.safetensors", "folder"]


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("out", OUTS)
def test_an_export_is_replaced_on_demand_alone(out: str, tmp_path: Path) -> None:
    """An export that is there is replaced on demand alone, as a whole."""
    export_weights(nn.ModuleList(nn.Linear(2, 2) for _ in range(3)), tmp_path / out, max_shard_size=20)
    before = content_of(tmp_path)
    refuses(lambda: export_weights(Small(), tmp_path / out), out, "exists already", "--overwrite")
    assert content_of(tmp_path) == before
    module = Small()
    export_weights(module, tmp_path / out, overwrite=True)
    assert_same(read_weights(tmp_path / out), module.state_dict())
    assert len(content_of(tmp_path)) == 1


def test_other_things_are_never_replaced(tmp_path: Path) -> None:
    """A folder with files of others, a file in place of a folder, a folder in place of a file, links."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "x.safetensors").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    before = content_of(tmp_path)
    for out, reason in [
        ("notes", "'a.txt'"),
        ("file", "is no folder"),
        ("x.safetensors", "is a folder"),
        ("link", "is no folder"),
    ]:
        refuses(partial(export_weights, Small(), tmp_path / out, overwrite=True), out, reason)
    assert content_of(tmp_path) == before
    # An empty folder is as good as none, and a missing one is made.
    export_weights(Small(), tmp_path / "empty")
    export_weights(Small(), tmp_path / "new" / "deep" / "x.safetensors")
    assert read_weights(tmp_path / "empty").keys() == read_weights(tmp_path / "new" / "deep" / "x.safetensors").keys()


class Failing:
    """Fails in place of the second write."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
        self.calls = 0
        self.error = error
        self.write = layout._write_bytes
        monkeypatch.setattr(layout, "_write_bytes", self)

    def __call__(self, *args: Any) -> None:
        self.calls += 1
        if self.calls == 2:
            raise self.error
        self.write(*args)


@pytest.mark.parametrize(("kind", "out", "earlier"), pairwise([KeyboardInterrupt, OSError], OUTS, [False, True]))
def test_an_interrupted_export_leaves_what_was_there(
    kind: Any, out: str, earlier: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if earlier:
        export_weights(Small(), tmp_path / out)
    before = content_of(tmp_path)
    Failing(monkeypatch, kind(errno.ENOSPC, "No space left on device"))
    # A full disk is explained.
    with pytest.raises(CheckpointError if kind is OSError else kind, match=r"bytes|No space"):
        export_weights(Small(), tmp_path / out, overwrite=True)
    assert content_of(tmp_path) == before
    assert len(list(tmp_path.iterdir())) == int(earlier)


EXPORT = """
import os, signal, sys
from equipoise.extensions.export import export_weights, layout
from torch import nn

def stop(*args):
    print("writing", flush=True)
    signal.pause()

layout._write_bytes = stop
export_weights(nn.Linear(2, 2), sys.argv[1], overwrite=True)
"""


@pytest.mark.parametrize("out", OUTS)
def test_a_killed_export_leaves_what_was_there(out: str, tmp_path: Path) -> None:
    """It leaves what was there, and a hidden file or folder that the next export removes."""
    module = Small()
    export_weights(module, tmp_path / out)
    with Program(EXPORT, str(tmp_path / out)) as program:
        assert program.stdout.readline() == "writing\n"
        os.kill(program.pid, signal.SIGKILL)
        program.finish()
    assert_same(read_weights(tmp_path / out), module.state_dict())
    hidden = [path.name for path in tmp_path.iterdir() if path.name != out]
    assert len(hidden) == 1
    assert hidden[0].startswith(f".{out}.")
    export_weights(module, tmp_path / out, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == [out]


# Elsewhere.


@pytest.mark.parametrize("out", ["x.safetensors", "folder", "folder/"])
def test_another_file_system_is_read_and_written(out: str, memory_files: Any, tmp_path: Path) -> None:
    """A checkpoint is read there, and an export written and read."""
    module = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    with memory_files.open("memory://run/x.ckpt", "wb") as file:
        torch.save({"state_dict": module.state_dict()}, file)
    url = f"memory://run/{out}"
    result = export_weights("memory://run/x.ckpt", url, max_shard_size=20)
    assert all(memory_files.exists(file) for file in result.files)
    assert len(result.files) == (1 if out == "x.safetensors" else 7)
    assert_same(read_weights(url), module.state_dict())
    refuses(lambda: export_weights(module, url), "exists already")


def test_an_interrupt_leaves_what_was_there_elsewhere(memory_files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    export_weights(Small(), "memory://run/x.safetensors")
    before = memory_files.cat("memory://run/x.safetensors")
    Failing(monkeypatch, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        export_weights(Small(), "memory://run/x.safetensors", overwrite=True)
    assert memory_files.cat("memory://run/x.safetensors") == before


def test_urls_that_are_refused(memory_files: Any) -> None:
    refuses(lambda: export_weights(Small(), "nowhere://x.safetensors"), "cannot be used", "nowhere")
    for url in ("memory://none/x.safetensors", "memory://none", "nowhere://x"):
        refuses(partial(read_weights, url), "cannot be read", error=CheckpointError)
    refuses(lambda: export_weights("memory://none/x.ckpt", "memory://y"), "does not exist", error=CheckpointError)


def test_save_checkpoint_writes_safetensors_with_which_a_run_begins(memory_files: Any) -> None:
    module = Small()
    run: Trainer = trainer()
    run.fit(module, loader())
    run.save_checkpoint("memory://run/x.safetensors")
    assert_same(read_weights("memory://run/x.safetensors"), module.state_dict())
    other = Small()
    trainer().test(other, loader(), ckpt_path="memory://run/x.safetensors")
    assert_same(other.state_dict(), module.state_dict())


# Reading what others have written.


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ("{", "is no index of weights"),
        ('{"weight_map": []}', "is no index of weights"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "outside of its folder"),
        ('{"weight_map": {"a": ".."}}', "outside of its folder"),
        ('{"weight_map": {"a": "y.safetensors"}}', "does not exist"),
        ("[" * 100_000, "RecursionError"),
    ],
)
def test_a_damaged_index_is_refused(index: str, reason: str, tmp_path: Path) -> None:
    refuses(lambda: read_weights(tmp_path), "holds no 'model.safetensors'", error=CheckpointError)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    refuses(lambda: read_weights(tmp_path), reason, error=CheckpointError)


def test_an_index_says_what_each_file_holds(tmp_path: Path) -> None:
    """A tensor that an earlier export left in another file is not taken in its place."""
    for name in ("x", "y"):
        export_weights(
            {"a": torch.full((2,), float(name == "x")), name: torch.ones(1)}, tmp_path / f"{name}.safetensors"
        )
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "x.safetensors", "y": "y.safetensors"}}')
    assert torch.equal(read_weights(tmp_path)["a"], torch.ones(2))
    index.write_text('{"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}')
    refuses(lambda: read_weights(tmp_path), "'b'", "lacks", error=CheckpointError)
