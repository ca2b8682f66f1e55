"""Files: written at once or not at all, and everything in them plain."""

import enum
import io
import os
import stat
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from equipoise import Trainer
from equipoise.trainer.checkpoint_file import plain, read_checkpoint, write_checkpoint
from tests.conftest import ignoring
from tests.parity.comparison import differences
from tests.trainer.small import Small, loader, saved, trainer

pytestmark = ignoring()


def read(path: Any) -> Any:
    """What anybody can read, who allows nothing but tensors and plain containers."""
    return torch.load(path, weights_only=True)


# Writing


def test_what_is_written_is_read(tmp_path: Path) -> None:
    content = {"state_dict": {"a": torch.arange(3)}, "more": [1, "two", None, 3.5, True]}
    path = tmp_path / "new" / "folder" / "x.ckpt"
    write_checkpoint(content, path)
    assert not list(differences(content, read_checkpoint(path)))
    assert os.listdir(path.parent) == ["x.ckpt"]
    write_checkpoint({**content, "more": []}, str(path))
    assert read_checkpoint(str(path))["more"] == []


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)], ids=oct)
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


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    write_checkpoint({"state_dict": {"a": torch.ones(2)}}, path)
    before = path.read_bytes()
    with pytest.raises(AttributeError, match="pickle"):
        write_checkpoint({"state_dict": {}, "callback": lambda: None}, path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["x.ckpt"]


def test_an_interrupt_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.ckpt"
    write_checkpoint({"state_dict": {"a": torch.ones(2)}}, path)
    before = path.read_bytes()

    def interrupted(handle: int) -> None:
        assert path.read_bytes() == before
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint({"state_dict": {"a": torch.zeros(2)}}, path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["x.ckpt"]


WRITER = """
import io, os, sys, torch
from equipoise.trainer.checkpoint_file import write_checkpoint

class Stopping(io.BufferedWriter):
    def write(self, data):
        written = super().write(data)
        self.flush()
        if self.tell() > 50_000:
            stop()
        return written

def stop(*args):
    print("now", flush=True)
    sys.stdin.read()

if sys.argv[2] == "half":
    os.fdopen = lambda handle, mode: Stopping(io.FileIO(handle, "w"))
else:
    os.replace = stop
write_checkpoint({"state_dict": {name: torch.zeros(2_500) for name in "abcdefghij"}}, sys.argv[1])
"""


@pytest.mark.parametrize("moment", ["half", "before it takes its name"])
def test_a_killed_writer_leaves_the_old_file(tmp_path: Path, moment: str) -> None:
    path = tmp_path / "x.ckpt"
    write_checkpoint({"state_dict": {"a": torch.ones(2)}}, path)
    before = path.read_bytes()
    command = [sys.executable, "-c", WRITER, str(path), moment]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"now\n"
        writer.kill()
    assert path.read_bytes() == before
    (left,) = set(os.listdir(tmp_path)) - {"x.ckpt"}
    assert left.startswith(".x.ckpt.")
    assert left.endswith(".part")
    size = (tmp_path / left).stat().st_size
    assert 50_000 < size < 100_000 if moment == "half" else size > 100_000
    assert list(tmp_path.glob("*.ckpt")) == [path]
    write_checkpoint({"state_dict": {"a": torch.zeros(2)}}, path)
    assert not read_checkpoint(path)["state_dict"]["a"].any()


# Hyperparameters


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class Configured(Small):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.save_hyperparameters(config)


class Named(Small):
    def __init__(self, settings: Any, depth: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()


CONFIG = {"model": {"width": 8, "sizes": [1, 2], "act": "relu"}, "lr": 0.1, "double": "${lr}"}
RESOLVED = {**CONFIG, "double": 0.1}


@pytest.mark.parametrize("make", [Configured, Named])
def test_omegaconf_is_written_plain(tmp_path: Path, make: Any) -> None:
    path = saved(make(OmegaConf.create(CONFIG)), tmp_path)
    stored = read(path)["hyper_parameters"]
    assert stored == (RESOLVED if make is Configured else {"settings": RESOLVED, "depth": 2})
    assert type(stored) is dict


@pytest.mark.parametrize("config", [{"lr": "???", "again": "${lr}"}, {"lr": "${nowhere.lr}", "depth": 1}], ids=str)
def test_omegaconf_that_cannot_be_resolved(tmp_path: Path, config: dict[str, Any]) -> None:
    path = saved(Named(OmegaConf.create(config)), tmp_path)
    assert read(path)["hyper_parameters"]["settings"] == config


@pytest.mark.parametrize("cls", [L.Trainer, Trainer])
def test_lightnings_checkpoint_with_omegaconf_inside_is_read(tmp_path: Path, cls: Any) -> None:
    """A checkpoint of Lightning holds OmegaConf's own containers; one of ours does not."""
    path = saved(Configured(OmegaConf.create({**CONFIG, "none": None, "flag": True, "raw": b"x"})), tmp_path, cls)
    if cls is L.Trainer:
        with pytest.raises(Exception, match="Weights only load failed"):
            read(path)
    stored = read_checkpoint(path)["hyper_parameters"]
    assert OmegaConf.to_container(OmegaConf.create(stored), resolve=True) == {
        **RESOLVED,
        "none": None,
        "flag": True,
        "raw": b"x",
    }
    module, run = Configured(OmegaConf.create(CONFIG)), trainer(max_epochs=2)
    run.fit(module, loader(), ckpt_path=path)
    assert run.global_step == 6


def test_what_has_a_plain_form_is_made_plain(tmp_path: Path) -> None:
    settings = {
        "folder": Path("data") / "x",
        "colour": Colour.RED,
        "level": Level.LOW,
        "nested": Namespace(a=1, b=Namespace(c=[2])),
        "array": np.arange(3.0),
        "scalar": np.float32(0.5),
        "integer": np.int64(7),
        "pair": (1, "two"),
        "set": {3},
        "tensor": torch.ones(2),
        "dtype": torch.float64,
        "device": torch.device("cpu"),
        "shape": torch.Size([1, 2]),
        4: None,
    }
    stored = read(saved(Named(settings), tmp_path))["hyper_parameters"]["settings"]
    assert torch.equal(stored.pop("tensor"), torch.ones(2))
    assert stored == {
        "folder": "data/x",
        "colour": "red",
        "level": 1,
        "nested": {"a": 1, "b": {"c": [2]}},
        "array": [0.0, 1.0, 2.0],
        "scalar": 0.5,
        "integer": 7,
        "pair": [1, "two"],
        "set": [3],
        "dtype": torch.float64,
        "device": torch.device("cpu"),
        "shape": torch.Size([1, 2]),
        4: None,
    }


class Strange:
    """Nobody knows how to write this down."""


def test_what_has_none_is_left_out(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="left out") as caught:
        path = saved(Named({"odd": Strange(), "list": [1, len, 2], "kept": 3}), tmp_path)
    messages = [str(warning.message) for warning in caught if "left out" in str(warning.message)]
    assert len(messages) == 2
    assert "hyper_parameters['settings']['odd'] is a Strange" in messages[0]
    assert "hyper_parameters['settings']['list'][1] is a builtin_function" in messages[1]
    assert "save_hyperparameters(ignore=...)" in messages[0]
    assert read(path)["hyper_parameters"]["settings"] == {"list": [1, 2], "kept": 3}


def test_a_subclass_of_a_plain_type_is_made_plain() -> None:
    """A string or a number of somebody's own class would bring that class into the file."""

    stored = plain({"name": np.str_("x"), "number": np.float64(0.5), "raw": np.bytes_(b"x"), "flag": np.bool_(True)})
    buffer = io.BytesIO()
    torch.save(stored, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True) == {"name": "x", "number": 0.5, "raw": b"x", "flag": True}


@pytest.mark.parametrize(
    ("config", "kind"),
    [({"lr": 0.5}, dict), (Namespace(lr=0.5), dict), (OmegaConf.create({"lr": 0.5}), DictConfig)],
    ids=["dict", "Namespace", "DictConfig"],
)
def test_load_from_checkpoint(tmp_path: Path, config: Any, kind: type) -> None:
    module = Configured(config)
    path = saved(module, tmp_path)
    again = Configured.load_from_checkpoint(path)
    assert again.hparams.lr == 0.5
    assert isinstance(again.hparams, dict)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), again.parameters(), strict=True))


def test_load_from_checkpoint_with_arguments(tmp_path: Path) -> None:
    path = saved(Named(OmegaConf.create({"lr": 0.5}), depth=3), tmp_path)
    again = Named.load_from_checkpoint(path, depth=4)
    assert again.hparams["settings"] == {"lr": 0.5}
    assert again.hparams["depth"] == 4
