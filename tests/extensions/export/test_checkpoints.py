"""Weights of checkpoints: of Lightning, averaged, in shards, compiled; and files that are no such checkpoints."""

import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn

from equipoise import CheckpointError
from equipoise.extensions.export import export_weights, read_weights
from equipoise.parallel.shards.placeholders import make_placeholder
from tests.extensions.export.modules import assert_same
from tests.extensions.fsdp.programs import Net, assert_close, fit, fsdp, weights_of
from tests.parallel.shards.folders import save
from tests.support.rounded_tensors import Rounded
from tests.support.trainer_runs import Small, loader, refuses, saved, trainer

pytestmark = pytest.mark.filterwarnings("ignore:The `srun` command")


def exported(source: Any, **options: Any) -> dict[str, Tensor]:
    """Return what is read back."""
    out = Path(source).parent / "exported.safetensors"
    export_weights(source, out, overwrite=True, **options)
    return read_weights(out)


class Saves(L.Callback):
    """Saves at the end of an epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.folder / "x.ckpt")
        trainer.save_checkpoint(self.folder / "x.safetensors")


@pytest.mark.parametrize(("cls", "weights_only"), [(L.Trainer, False), (None, True)], ids=["Lightning", "ours"])
def test_a_checkpoint_of_either_trainer_is_exported(cls: Any, weights_only: bool, tmp_path: Path) -> None:
    module = Small()
    options = {} if cls is None else {"cls": cls}
    path = saved(module, tmp_path, weights_only=weights_only, **options)
    assert_same(exported(path), module.state_dict())


def test_averaged_or_trained_weights_are_exported(tmp_path: Path) -> None:
    module = Small()
    trainer(callbacks=[EMAWeightAveraging(decay=0.5), Saves(tmp_path)]).fit(module, loader())
    content = torch.load(tmp_path / "x.ckpt", weights_only=False)
    averaged, last = content["state_dict"], content["current_model_state"]
    assert not torch.equal(averaged["layer.weight"], last["layer.weight"])
    assert_same(exported(tmp_path / "x.ckpt"), averaged)
    assert_same(read_weights(tmp_path / "x.safetensors"), last)
    assert_same(exported(tmp_path / "x.ckpt", weights="averaged"), averaged)
    assert_same(exported(tmp_path / "x.ckpt", weights="trained"), last)
    refuses(lambda: exported(tmp_path / "x.ckpt", weights="ema"), "averaged, trained", "'ema'")
    refuses(lambda: export_weights(module, tmp_path / "y", weights="trained"), "'trained'", "module")
    plain = saved(Small(), tmp_path)
    refuses(lambda: exported(plain, weights="averaged"), "no averaged weights", error=CheckpointError)


@pytest.mark.slow
def test_checkpoints_in_shards_of_fsdp_are_exported(tmp_path: Path) -> None:
    """A folder of two processes, and a file of safetensors that they write, hold the weights of the module."""
    module, _ = fit(Net, fsdp(checkpoints="sharded"), 2, max_epochs=1, callbacks=[Saves(tmp_path)])
    assert (tmp_path / "x.ckpt" / "index.json").is_file()
    assert_same(exported(tmp_path / "x.ckpt"), module.state_dict())
    path = tmp_path / "x.safetensors"
    assert_same(read_weights(path), module.state_dict())
    # A run in shards begins with it as one on a single device does.
    sharded, _ = fit(Net, fsdp(), 2, max_epochs=1, ckpt_path=path)
    alone, _ = fit(Net, max_epochs=1, ckpt_path=path)
    assert_close(weights_of(sharded), weights_of(alone))
    assert not torch.equal(alone.first.weight, module.first.weight)


def test_a_folder_in_shards_is_exported(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(7, 3, 2), "b": torch.arange(5).bfloat16(), "empty": torch.ones(0, 2)}
    named = {name: make_placeholder(value, name) for name, value in tensors.items()}
    state = {"tied": named["a"], **named, "whole": torch.ones(3)}
    folder = tmp_path / "x.ckpt"
    save(folder, tensors, {"state_dict": state}, count=3)
    read = exported(folder)
    assert_same(read, {"tied": tensors["a"], **tensors, "whole": torch.ones(3)})
    assert read["tied"] is read["a"]
    refuses(lambda: export_weights(folder / "rest.pt", tmp_path / "y"), "Pass the folder", error=CheckpointError)
    # A damaged shard is found, and leaves no file.
    shards = folder / "rank-00000.shards"
    content = bytearray(shards.read_bytes())
    content[3] ^= 1
    shards.write_bytes(content)
    files = sorted(tmp_path.iterdir())
    refuses(lambda: export_weights(folder, tmp_path / "y"), "not what was written", error=CheckpointError)
    assert sorted(tmp_path.iterdir()) == files


def test_a_damaged_file_leaves_nothing(tmp_path: Path) -> None:
    torch.save({"state_dict": {"a": torch.arange(1000), "b": torch.arange(1000, 2000)}}, tmp_path / "x.ckpt")
    content = bytearray((tmp_path / "x.ckpt").read_bytes())
    content[content.find(torch.tensor(1500).numpy().tobytes())] ^= 1
    (tmp_path / "x.ckpt").write_bytes(content)
    for out in ("y.safetensors", "y"):
        export = partial(export_weights, tmp_path / "x.ckpt", tmp_path / out)
        refuses(export, "x.ckpt", "Bad CRC-32", error=CheckpointError)
    assert [path.name for path in tmp_path.iterdir()] == ["x.ckpt"]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (3, "'b' cannot be exported: it is no tensor but 3"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.zeros(1, dtype=torch.complex128), "complex128"),
        (Rounded(torch.ones(2).bfloat16(), torch.float32), "Rounded"),
    ],
)
def test_values_that_the_format_lacks_are_refused(value: Any, reason: str, tmp_path: Path) -> None:
    state = {"a.weight": torch.ones(2), "b": value}
    refuses(lambda: export_weights(state, tmp_path / "y"), reason, "prefix", error=CheckpointError)
    torch.save({"state_dict": state}, tmp_path / "x.ckpt")
    refuses(lambda: export_weights(tmp_path / "x.ckpt", tmp_path / "y"), "'b' cannot", error=CheckpointError)
    assert not (tmp_path / "y").exists()
    # What has a place in it is exported.
    export_weights(tmp_path / "x.ckpt", tmp_path / "y", prefix="a")
    assert read_weights(tmp_path / "y").keys() == {"weight"}


def test_values_that_a_dtype_lacks_are_refused(tmp_path: Path) -> None:
    state = {"a": torch.tensor([1e6, torch.inf])}
    refuses(lambda: export_weights(state, tmp_path / "y", dtype="float16"), "'a'", "too large", error=CheckpointError)
    export_weights({"a": state["a"][1:]}, tmp_path / "y", dtype="float16")
    assert read_weights(tmp_path / "y")["a"].isinf().all()


def test_a_name_that_the_format_keeps_is_refused(tmp_path: Path) -> None:
    state = {"__metadata__": torch.ones(1)}
    refuses(lambda: export_weights(state, tmp_path / "y"), "means something else", error=CheckpointError)


def test_a_member_shorter_than_it_says_is_refused(tmp_path: Path) -> None:
    """A made-up archive with a check sum of what it has would give a file without its end."""
    torch.save({"state_dict": {"a": torch.arange(100.0)}}, tmp_path / "x.ckpt")
    with (
        zipfile.ZipFile(tmp_path / "x.ckpt") as archive,
        zipfile.ZipFile(tmp_path / "bad.ckpt", "w", zipfile.ZIP_STORED) as bad,
    ):
        for member in archive.infolist():
            is_short = member.filename.endswith("data/0")
            bad.writestr(member.filename, archive.read(member)[: 40 if is_short else None])
            if is_short:
                bad.filelist[-1].file_size = 400
    files = sorted(tmp_path.iterdir())
    refuses(lambda: export_weights(tmp_path / "bad.ckpt", tmp_path / "y"), "'a'", "damaged", error=CheckpointError)
    assert sorted(tmp_path.iterdir()) == files


def test_modules_without_values_are_refused(tmp_path: Path) -> None:
    with torch.device("meta"):
        module = nn.Linear(2, 2)
    refuses(lambda: export_weights(module, tmp_path / "y"), "meta device has no values", error=CheckpointError)
    refuses(lambda: export_weights(nn.LazyLinear(2), tmp_path / "y"), "before the first forward", error=CheckpointError)
    assert not list(tmp_path.iterdir())


def test_sources_and_arguments_that_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "y"
    saved(Small(), tmp_path)
    refuses(lambda: export_weights(tmp_path / "y.ckpt", out), "does not exist", "x.ckpt", error=CheckpointError)
    refuses(lambda: export_weights(tmp_path, out), "is a folder", "x.ckpt", error=CheckpointError)
    torch.save(Small().state_dict(), tmp_path / "weights.pt")
    refuses(lambda: export_weights(tmp_path / "weights.pt", out), "no 'state_dict'", error=CheckpointError)
    (tmp_path / "text.ckpt").write_text("no zip")
    refuses(lambda: export_weights(tmp_path / "text.ckpt", out), "no zip archive", error=CheckpointError)
    refuses(lambda: export_weights(3, out), "tensors by name", error=CheckpointError)  # type: ignore[arg-type]
    assert not out.exists()
