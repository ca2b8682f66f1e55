"""Weights that are exported and read back are the same to the bit, under all of their names."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from equipoise import CheckpointError
from equipoise.extensions.export import export_weights, read_weights
from tests.extensions.export.modules import assert_same, module_of_all_kinds
from tests.support.trainer_runs import refuses


@pytest.mark.parametrize("source", ["module", "file", "tensors"])
def test_tensors_of_every_kind_are_read_back_to_the_bit(source: str, tmp_path: Path) -> None:
    module = module_of_all_kinds()
    state = module.state_dict()
    torch.save({"state_dict": state}, tmp_path / "x.ckpt")
    sources: dict[str, Any] = {"module": module, "file": tmp_path / "x.ckpt", "tensors": state}
    out = tmp_path / "x.safetensors"
    export_weights(sources[source], out)
    read = read_weights(out)
    assert_same(read, state)

    # The library reads the same, without further names of tied tensors.
    alone = safetensors.torch.load_file(out)
    assert_same(alone, {key: state[key] for key in alone})
    assert state.keys() - alone.keys() == {"ü.tied", "ü.shared"}

    # What is tied in the module is one tensor in what was read.
    assert read["ü.tied"] is read["a.weight"]
    assert read["ü.shared"] is read["a.plain_int64"]
    assert len({id(value) for value in read.values()}) == len(alone)

    # A fresh module loads it.
    fresh = module_of_all_kinds(seed=1)
    fresh.load_state_dict(read, assign=True)
    assert_same(fresh.state_dict(), state)


def test_tensors_of_every_kind_are_read_back_from_several_files(tmp_path: Path) -> None:
    state = module_of_all_kinds().state_dict()
    torch.save({"state_dict": state}, tmp_path / "x.ckpt")
    result = export_weights(tmp_path / "x.ckpt", tmp_path / "out", max_shard_size=100)
    assert_same(read_weights(tmp_path / "out"), state)
    sizes = [len(safetensors.torch.load_file(file)) for file in result.files if file.endswith(".safetensors")]
    assert sum(sizes) > 1
    assert all(Path(file).is_file() for file in result.files)
    # The length of what stands before the tensors is a multiple of 8.
    assert not any(file.read_bytes()[0] % 8 for file in (tmp_path / "out").glob("*.safetensors"))


def test_tied_weights_are_read_and_written_as_the_library_does(tmp_path: Path) -> None:
    layer, fresh = nn.Linear(2, 2), nn.Linear(2, 2)
    module = nn.ModuleDict({"a": layer, "b": layer})
    safetensors.torch.save_model(module, str(tmp_path / "theirs.safetensors"))
    assert_same(read_weights(tmp_path / "theirs.safetensors"), module.state_dict())
    export_weights(module, tmp_path / "ours.safetensors")
    safetensors.torch.load_model(nn.ModuleDict({"a": fresh, "b": fresh}), tmp_path / "ours.safetensors")
    assert_same(fresh.state_dict(), layer.state_dict())


def test_a_part_is_exported_by_prefix_in_another_dtype(tmp_path: Path) -> None:
    module = nn.ModuleDict({"net": nn.BatchNorm1d(3), "other": nn.Linear(2, 2)})
    with torch.no_grad():
        module["net"].weight.copy_(torch.tensor([1 / 3, 2.0, 1e-3]))
    torch.save({"state_dict": module.state_dict()}, tmp_path / "x.ckpt")
    expected = {
        name: value.bfloat16() if value.is_floating_point() else value
        for name, value in module["net"].state_dict().items()
    }
    for prefix in ("net", "net."):
        options: dict[str, Any] = {"prefix": prefix, "dtype": "bfloat16", "overwrite": True}
        result = export_weights(tmp_path / "x.ckpt", tmp_path / "x.safetensors", **options)
        assert result.left_out == ("other.weight", "other.bias")
        assert_same(read_weights(tmp_path / "x.safetensors"), expected)
        export_weights(module, tmp_path / "y.safetensors", prefix=prefix, dtype=torch.bfloat16, overwrite=True)
        assert (tmp_path / "y.safetensors").read_bytes() == (tmp_path / "x.safetensors").read_bytes()
    refuses(lambda: export_weights(tmp_path / "x.ckpt", tmp_path / "z", prefix="nett"), "'nett.'", "net, other")
    refuses(lambda: export_weights(module, tmp_path / "z", prefix="nett"), "'nett'")
    assert not (tmp_path / "z").exists()


def test_names_are_those_without_compilation(tmp_path: Path) -> None:
    module = nn.ModuleDict({"net": torch.compile(nn.Linear(2, 2))})
    assert "net._orig_mod.weight" in module.state_dict()
    export_weights(module, tmp_path / "x.safetensors")
    assert set(read_weights(tmp_path / "x.safetensors")) == {"net.weight", "net.bias"}


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    export_weights(nn.Linear(2, 2), tmp_path / "x.safetensors")
    content = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "x.safetensors").write_bytes(content[:-1])
    refuses(lambda: read_weights(tmp_path / "x.safetensors"), "cannot be read as safetensors", error=CheckpointError)
