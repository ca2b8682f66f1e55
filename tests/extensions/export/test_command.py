"""`equipoise export` on a terminal."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from equipoise.__main__ import main
from equipoise.extensions.export import read_weights
from tests.extensions.export.modules import assert_same
from tests.support.trainer_runs import Small, saved


def export(*arguments: Any) -> int:
    return main(["export", *map(str, arguments)])


def test_a_checkpoint_is_exported_with_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = Small()
    checkpoint = saved(module, tmp_path)
    out = tmp_path / "out"
    assert export(checkpoint, out) == 0
    assert capsys.readouterr().out == f"wrote {out}/model.safetensors\n"
    assert_same(read_weights(out), module.state_dict())
    assert export(checkpoint, out, "--prefix=layer", "--dtype=bfloat16", "--max-shard-size=2", "--overwrite") == 0
    weights = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert weights == {"weight": "model-00001-of-00002.safetensors", "bias": "model-00002-of-00002.safetensors"}
    assert_same(read_weights(out), module.layer.bfloat16().state_dict())


def test_the_command_works_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that reads no configuration works in a subfolder of a project, with names as Lightning gives them."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text("# equipoise")
    runs = tmp_path / "runs"
    runs.mkdir()
    saved(Small(), runs).rename(runs / "epoch=0-step=3.ckpt")
    monkeypatch.chdir(runs)
    assert export("epoch=0-step=3.ckpt", "out") == 0
    assert read_weights("out").keys() == Small().state_dict().keys()


def test_what_is_left_out_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {f"head.{index}": torch.ones(1) for index in range(8)}
    torch.save({"state_dict": {"net.a": torch.ones(1), **state}}, tmp_path / "x.ckpt")
    assert export(tmp_path / "x.ckpt", tmp_path / "x.safetensors", "--prefix=net") == 0
    assert "left out 8 outside of the prefix: head.0, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "equipoise export takes CKPT OUT"),
        (["x.ckpt"], "it was given x.ckpt"),
        (["x.ckpt", "y", "z"], "it was given x.ckpt y z"),
        (["x.ckpt", "y", "--dtype"], "--dtype takes a value"),
        (["x.ckpt", "y", "--dtype=int8"], "dtype must be one of"),
        (["x.ckpt", "y", "--max-shard-size=big"], "max_shard_size must be bytes"),
        (["x.ckpt", "y", "--safe"], "not --safe"),
        (["x.ckpt", "y", "--module=tests.support.trainer_runs.Small", "--weights=best"], "averaged, trained"),
        (["x.ckpt", "y", "--module=tests.support.trainer_runs.Validated", "--prefix=net"], "no part 'net'"),
        (["x.ckpt", "y", "--module=no.Such"], "--module"),
    ],
)
def test_arguments_that_are_refused(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(Small(), tmp_path)
    assert export(*arguments) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["x.ckpt"]
