"""Content of a checkpoint, its path, and the one that a name means."""

import logging
import os
from pathlib import Path
from typing import Any

import fsspec
import lightning as L
import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.utilities.migration import migrate_checkpoint
from torch.optim.lr_scheduler import StepLR

from equipoise import CheckpointError, Trainer
from equipoise.trainer.checkpointing.file_reading import read_checkpoint
from equipoise.trainer.checkpointing.reading import load_checkpoint
from tests.support.equality import assert_equal
from tests.support.trainer_runs import Data, Small, Validated, loader, refuses, saved, trainer, with_step

pytestmark = pytest.mark.filterwarnings(
    "ignore:The checkpoint holds states of callbacks", "ignore:There is a validation loader, but Small"
)


def read(path: Any) -> Any:
    """Read a checkpoint with nothing but tensors and plain containers allowed."""
    return torch.load(path, weights_only=True)


# The layout


class Scheduled(Validated):
    """With hyperparameters, momentum and a scheduler, and optimised by hand if asked."""

    def __init__(self, lr: float = 0.1, automatic: bool = True) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = automatic

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr / 1000, momentum=0.9)
        return [optimizer], [StepLR(optimizer, 1, gamma=0.5)]


RUNS: dict[str, dict[str, Any]] = {
    "two epochs": {"max_epochs": 2},
    "in the middle of an epoch": {"max_steps": 5},
    "accumulated": {"max_epochs": 2, "accumulate_grad_batches": 2, "limit_train_batches": 2},
    "validated inside": {"val_check_interval": 2},
    "limited": {"max_epochs": 2, "limit_train_batches": 2, "limit_val_batches": 1, "num_sanity_val_steps": 0},
    "by hand": {"max_epochs": 2, "automatic": False},
}


def run_under(cls: Any, folder: Path, *, automatic: bool = True, **options: Any) -> dict[str, Any]:
    """The checkpoints of a run, by name, with the folder left out of the paths in them."""
    torch.manual_seed(0)
    every = {"every_n_train_steps": 1} if automatic else {"every_n_epochs": 1}
    keeper = ModelCheckpoint(folder, save_last=True, save_top_k=-1, **every)
    run = trainer(cls, callbacks=[keeper], enable_checkpointing=True, **options)
    run.fit(Scheduled(automatic=automatic), loader(3), loader(2))
    run.save_checkpoint(folder / "end.ckpt")
    found = {path.name: read(path) for path in sorted(folder.iterdir())}
    for checkpoint in found.values():
        for state in checkpoint["callbacks"].values():
            state.update({key: value.replace(str(folder), "") for key, value in state.items() if type(value) is str})
            state["best_k_models"] = {path.replace(str(folder), ""): v for path, v in state["best_k_models"].items()}
    return found


@pytest.mark.quick_cases(3)
@pytest.mark.few_cases(2)
@pytest.mark.parametrize("name", RUNS)
def test_the_layout_of_a_checkpoint_is_lightnings(name: str, tmp_path: Path) -> None:
    """Every entry, every counter, to the bit; what is ours beside that stands under a key of its own."""
    theirs = run_under(L.Trainer, tmp_path / "lightning", **RUNS[name])
    ours = run_under(Trainer, tmp_path / "equipoise", **RUNS[name])
    assert list(theirs) == list(ours)
    assert len(theirs) > 3
    for file, checkpoint in ours.items():
        assert checkpoint.pop("equipoise")["version"] == 1
        assert_equal(theirs[file], checkpoint, title=file)


def test_weights_only_leaves_out_what_lightning_leaves_out(tmp_path: Path) -> None:
    theirs, ours = [read(saved(Scheduled(), tmp_path, cls, weights_only=True)) for cls in (L.Trainer, Trainer)]
    # All that is added is the identity of the run.
    assert ours.pop("equipoise").keys() == {"version", "run"}
    assert theirs.keys() == ours.keys()
    assert "optimizer_states" not in theirs


def test_a_file_of_lightning_1_4_is_migrated_as_lightning_does(tmp_path: Path) -> None:
    old = {"pytorch-lightning_version": "1.4.9", "state_dict": {"w": torch.ones(2)}, "epoch": 3, "global_step": 12}
    old |= {"callbacks": {}, "optimizer_states": [], "lr_schedulers": []}
    torch.save(old, tmp_path / "a.ckpt")
    migrated = load_checkpoint(tmp_path / "a.ckpt")
    assert migrated["loops"]["fit_loop"]["epoch_progress"]["current"]["completed"] == 3
    assert_equal(migrated, migrate_checkpoint(old)[0])


def test_a_checkpoint_of_a_validation_says_nothing_of_training(tmp_path: Path) -> None:
    run = trainer()
    run.validate(Validated(), loader(), verbose=False)
    run.save_checkpoint(tmp_path / "x.ckpt")
    assert "equipoise" not in read(tmp_path / "x.ckpt")


class Stateful(Data):
    """A data module with hyperparameters and a state."""

    def __init__(self, folder: Any = Path("data")) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.epochs = 0

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = state["epochs"]


def test_the_state_of_a_data_module_is_saved_and_loaded(tmp_path: Path) -> None:
    data, run = Stateful(), trainer()
    run.fit(Small(), datamodule=data)
    data.epochs = 7
    run.save_checkpoint(tmp_path / "x.ckpt")
    checkpoint = read_checkpoint(tmp_path / "x.ckpt")
    assert checkpoint["Stateful"] == {"epochs": 7}
    assert checkpoint["datamodule_hyper_parameters"] == {"folder": Path("data")}
    again = Stateful()
    trainer(max_epochs=2).fit(Small(), datamodule=again, ckpt_path=tmp_path / "x.ckpt")
    assert again.epochs == 7
    loaded = Stateful.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=False)
    assert loaded.hparams == {"folder": Path("data")}


# Plugins and far-away places


class Recording(TorchCheckpointIO):
    """Writes elsewhere, in its own way, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.asked.append((f"save {storage_options}", Path(path).name))
        torch.save({"packed": checkpoint}, Path(path).with_suffix(".packed"))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        self.asked.append((f"load {weights_only}", Path(path).name))
        return torch.load(Path(path).with_suffix(".packed"), weights_only=weights_only)["packed"]

    def remove_checkpoint(self, path: Any) -> None:
        self.asked.append(("remove", Path(path).name))
        Path(path).with_suffix(".packed").unlink()

    def teardown(self) -> None:
        self.asked.append(("teardown", ""))


def test_a_checkpoint_plugin_writes_reads_and_removes(tmp_path: Path) -> None:
    plugin = Recording()
    keeper = ModelCheckpoint(tmp_path, filename="{epoch}", monitor="loss", mode="max", save_top_k=1)
    run = trainer(plugins=[plugin], callbacks=[keeper], enable_checkpointing=True, max_epochs=2)
    run.fit(Small(), loader())
    assert plugin.asked == [
        ("save None", "epoch=0.ckpt"),
        ("save None", "epoch=1.ckpt"),
        ("remove", "epoch=0.ckpt"),
        ("teardown", ""),
    ]
    assert os.listdir(tmp_path) == ["epoch=1.packed"]
    plugin.asked.clear()
    run.save_checkpoint(tmp_path / "mine.ckpt", storage_options={"a": 1})
    again = trainer(plugins=plugin, max_epochs=3)
    again.fit(Small(), loader(), ckpt_path=tmp_path / "epoch=1.ckpt")
    assert plugin.asked == [("save {'a': 1}", "mine.ckpt"), ("load True", "epoch=1.ckpt"), ("teardown", "")]
    assert again.global_step == 9


def test_a_plugin_that_writes_in_the_background_has_written_at_the_end(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    run = trainer(plugins=AsyncCheckpointIO(), callbacks=[keeper], enable_checkpointing=True, max_epochs=2)
    run.fit(Small(), loader())
    assert {path.name: read(path)["epoch"] for path in tmp_path.iterdir()} == {"epoch=0.ckpt": 0, "epoch=1.ckpt": 1}


def test_checkpoints_at_an_address_that_only_fsspec_knows(memory_files: Any) -> None:
    keeper = ModelCheckpoint(
        "memory://run/kept", filename="{epoch}", monitor="loss", mode="max", save_top_k=1, save_last=True
    )
    run = trainer(callbacks=[keeper], enable_checkpointing=True, max_epochs=2, default_root_dir="memory://run")
    assert run.default_root_dir == "memory://run"
    run.fit(Small(), loader())
    assert sorted(memory_files.ls("/run/kept", detail=False)) == ["/run/kept/epoch=1.ckpt", "/run/kept/last.ckpt"]
    again = trainer(max_epochs=3)
    again.fit(Small(), loader(), ckpt_path="memory://run/kept/last.ckpt")
    assert again.global_step == 9
    with pytest.raises(CheckpointError, match=r"'memory://run/kept/gone\.ckpt'"):
        load_checkpoint("memory://run/kept/gone.ckpt")


class MakesFolder:
    """An object whose creation makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.makedirs, (str(self.path), 0o777, True)


def test_code_in_a_file_from_a_url_runs_only_with_weights_only_false(memory_files: Any, tmp_path: Path) -> None:
    run = trainer()
    run.fit(Small(), loader())
    run.save_checkpoint(tmp_path / "x.ckpt")
    made, url = tmp_path / "made", "memory://run/x.ckpt"
    with fsspec.open(url, "wb") as file:
        torch.save({**read(tmp_path / "x.ckpt"), "extra": MakesFolder(made)}, file)
    with pytest.warns(UserWarning, match=r"'extra' \(os\.makedirs\)"):
        trainer(max_epochs=2).fit(Small(), loader(), ckpt_path=url)
    assert not made.exists()
    with pytest.warns(UserWarning, match="weights_only=False: the code"):
        trainer(max_epochs=2).fit(Small(), loader(), ckpt_path=url, weights_only=False)
    assert made.exists()


# Which one


class Weights(Small):
    """Its loss grows from epoch to epoch, so the first checkpoint is the best and the last one is not."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("rising", float(self.current_epoch))
        return loss


@pytest.fixture
def fitted(tmp_path: Path) -> Trainer:
    """A trainer that has kept the checkpoints of three epochs, the first of them the best."""
    keeper = ModelCheckpoint(tmp_path, filename="{epoch}", monitor="rising", save_top_k=-1, save_last=True)
    run = trainer(callbacks=[keeper], enable_checkpointing=True, max_epochs=3)
    run.fit(Weights(), loader())
    return run


def weights_in(path: Path) -> Any:
    return read(path)["state_dict"]["layer.weight"]


@pytest.mark.parametrize(
    ("given", "file"),
    [("best", "epoch=0.ckpt"), ("last", "last.ckpt"), ("path", "epoch=1.ckpt"), ("str", "epoch=1.ckpt")],
)
def test_ckpt_path_by_name_and_by_path(fitted: Trainer, tmp_path: Path, given: str, file: str) -> None:
    path: Any = {"path": tmp_path / file, "str": str(tmp_path / file)}.get(given, given)
    module = Weights()
    fitted.test(module, loader(), ckpt_path=path, verbose=False)
    assert torch.equal(module.layer.weight, weights_in(tmp_path / file))
    assert os.fspath(fitted.ckpt_path) == str(tmp_path / file)


@pytest.mark.parametrize("entry", ["validate", "test", "predict"])
def test_without_a_module_the_best_checkpoint_is_meant(fitted: Trainer, tmp_path: Path, entry: str) -> None:
    fitted.lightning_module.validation_step = lambda batch, batch_idx: None
    with pytest.warns(UserWarning, match="the best checkpoint of the last fit is used"):
        getattr(fitted, entry)(dataloaders=loader())
    assert torch.equal(fitted.lightning_module.layer.weight, weights_in(tmp_path / "epoch=0.ckpt"))


def test_with_a_module_no_checkpoint_is_meant(fitted: Trainer) -> None:
    module = Weights()
    before = module.layer.weight.detach().clone()
    fitted.test(module, loader(), verbose=False)
    assert torch.equal(module.layer.weight, before)
    assert fitted.ckpt_path is None


def test_the_newest_of_all_last_checkpoints_is_meant(tmp_path: Path) -> None:
    keepers = [
        ModelCheckpoint(tmp_path / name, save_last=True, every_n_epochs=every) for name, every in (("a", 1), ("b", 2))
    ]
    run = trainer(callbacks=keepers, enable_checkpointing=True, max_epochs=3)
    run.fit(Small(), loader())
    for name, age in (("a", 100), ("b", 200)):
        os.utime(tmp_path / name / "last.ckpt", (age, age))
    run.test(Small(), loader(), ckpt_path="last", verbose=False)
    assert run.ckpt_path == str(tmp_path / "b" / "last.ckpt")


def test_a_fit_beside_on_exception_checkpoint_begins_anew_and_last_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(module: Any, batch: Any) -> Any:
        if module.global_step == 4:
            raise MemoryError("once")
        return module.loss(batch)

    def fit(module: Small, ckpt_path: str | None) -> Trainer:
        run = trainer(callbacks=[OnExceptionCheckpoint(tmp_path)], enable_checkpointing=True, max_epochs=2)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            run.fit(module, loader(), ckpt_path=ckpt_path)
        return run

    with pytest.raises(MemoryError):
        fit(with_step(fail), None)
    assert "begins anew" not in caplog.text
    (path,) = tmp_path.iterdir()
    assert read(path)["global_step"] == 4
    # 1. Nothing is asked for: the file of an error is no order. The callback removes it at the end.
    left = path.read_bytes()
    module = Small()
    fit(module, None)
    assert f"The fit begins anew beside {path}" in caplog.text
    assert module.ran == ["training"] * 6
    path.write_bytes(left)
    # 2. "last" is.
    module = Small()
    again = fit(module, "last")
    assert f"Restored all states from the checkpoint at {path}" in caplog.text
    assert module.ran == ["training"] * 2
    assert again.global_step == 6


@pytest.mark.parametrize("hook", ["setup", "configure_optimizers", "on_train_start"])
def test_a_checkpoint_of_a_run_that_fails_before_it_begins(tmp_path: Path, hook: str) -> None:
    """Saving then must not hide what went wrong."""

    def fail(self: Any, *args: Any, **kwargs: Any) -> None:
        raise MemoryError("first cause")

    module = type("Failing", (Small,), {hook: fail})()
    run = trainer(callbacks=[OnExceptionCheckpoint(tmp_path)], enable_checkpointing=True)
    with pytest.raises(MemoryError, match="first cause"):
        run.fit(module, loader())
    assert [read(path)["global_step"] for path in tmp_path.iterdir()] == [0]


# Strictness


def test_strict_loading_of_weights_is_the_modules_choice(tmp_path: Path) -> None:
    path = saved(Small(), tmp_path)
    module = Small()
    module.extra = torch.nn.Linear(1, 1)
    refuses(lambda: trainer().test(module, loader(), ckpt_path=path), "extra.weight", error=CheckpointError)
    module.strict_loading = False
    trainer().test(module, loader(), ckpt_path=path, verbose=False)
    assert torch.equal(module.layer.weight, weights_in(path))


def test_states_of_callbacks_that_are_missing_are_named_in_a_warning(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, filename="x")
    trainer(callbacks=[keeper], enable_checkpointing=True).fit(Small(), loader())
    with pytest.warns(UserWarning, match="states of callbacks that are missing.*ModelCheckpoint.*Add the callbacks"):
        trainer(max_epochs=2).fit(Small(), loader(), ckpt_path=tmp_path / "x.ckpt")
