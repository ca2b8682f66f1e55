"""Resumptions at the edges of a run: in an epoch that a limit cut short, after the last batch, between two rows."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from tests.parity.resumption import Resumable
from tests.support.trainer_runs import trainer

pytestmark = pytest.mark.filterwarnings("ignore:Experiment logs")

SAMPLES = 10


class Killed(Exception):
    """Ends a run at once, as a signal would: no hook that the loop fires afterwards is fired."""


class Kill(L.Callback):
    """Ends the run in a hook; the last of all callbacks, behind those that save.

    Args:
        hook: The name of the hook.
        at: At which call.
    """

    def __init__(self, hook: str, at: int = 1) -> None:
        self.calls = 0

        def kill(run: Any, *args: Any) -> None:
            self.calls += 1
            if self.calls == at:
                raise Killed

        setattr(self, hook, kill)


class KillingCheckpoint(ModelCheckpoint):
    """A checkpoint callback whose run is killed when it has written a number of files.

    Args:
        at: The number of files.
        options: Those of ModelCheckpoint.
    """

    def __init__(self, at: float, **options: Any) -> None:
        super().__init__(**options)
        self.at, self.files = at, 0

    @property
    def state_key(self) -> str:
        return "keeper"

    def _save_checkpoint(self, run: Any, filepath: str) -> None:
        super()._save_checkpoint(run, filepath)
        self.files += 1
        if self.files == self.at:
            raise Killed


class Stream(IterableDataset[Tensor]):
    """Samples in random order, without length."""

    def __iter__(self) -> Any:
        return iter(torch.randperm(SAMPLES).double().unsqueeze(1))


class Module(L.LightningModule):
    """Logs steps and epochs; drops out."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.3), nn.Linear(4, 1)).double()
        self.seen: list[Any] = []
        self.ended = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features = batch if isinstance(batch, Tensor) else batch[0]
        self.seen.append(features.flatten().tolist())
        loss = self.net(features.double()[:, :1] / SAMPLES).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("descending", -float(batch_idx + SAMPLES * self.current_epoch), on_step=True, on_epoch=False)
        return loss

    def on_train_end(self) -> None:
        self.ended += 1

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def rows() -> list[Tensor]:
    """The samples."""
    return list(torch.arange(SAMPLES, dtype=torch.float64).unsqueeze(1))


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(rows(), shuffle=True),
    "own-generator": lambda: DataLoader(rows(), shuffle=True, generator=torch.Generator().manual_seed(3)),
    "persistent-workers": lambda: DataLoader(rows(), shuffle=True, num_workers=1, persistent_workers=True),
    "unsized": lambda: DataLoader(Stream()),
    "stateful": lambda: Resumable(SAMPLES, 1),
}


def fit(
    data: Any, callbacks: list[Any] | None = None, path: Any = None, module: Any = None, seed: int = 1, **options: Any
) -> Any:
    """A run; returns its trainer."""
    torch.manual_seed(0)
    module = Module() if module is None else module
    if isinstance(data, Resumable):
        module.net[0] = nn.Linear(1, 4).double()
    torch.manual_seed(seed)
    run = trainer(callbacks=callbacks, enable_checkpointing=True, **options)
    run.fit(module, data, ckpt_path=path)
    return run


def weights(run: Any) -> Tensor:
    """All weights of a run's module."""
    return torch.cat([parameter.detach().flatten() for parameter in run.lightning_module.parameters()])


def keeper(folder: Path, **options: Any) -> ModelCheckpoint:
    """Writes a last checkpoint, wherever nothing else is said at the end of every epoch."""
    return ModelCheckpoint(folder, save_last=True, **options)


# In the midst of an epoch


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("how", ["afterwards", "by a callback"])
@pytest.mark.parametrize("name", LOADERS)
def test_a_run_that_max_steps_ended_goes_on_in_its_epoch(name: str, how: str, tmp_path: Path) -> None:
    """With a higher limit, no sample of the epoch is lost or seen again, and its values are those of all of it."""
    make = LOADERS[name]
    options = {"max_epochs": -1, "accumulate_grad_batches": 2}
    expected = fit(make(), [keeper(tmp_path / "whole")], max_steps=8, **options)
    first = fit(make(), [keeper(tmp_path / "part")], max_steps=2, **options)
    path = tmp_path / "part" / "last.ckpt"
    if how == "afterwards":
        path = tmp_path / "after.ckpt"
        first.save_checkpoint(path)
    resumed = fit(make(), [keeper(tmp_path / "part")], path, max_steps=8, seed=7, **options)
    assert resumed.lightning_module.seen == expected.lightning_module.seen
    assert torch.equal(weights(resumed), weights(expected))
    assert resumed.callback_metrics["loss_epoch"] == expected.callback_metrics["loss_epoch"]
    assert (resumed.current_epoch, resumed.global_step) == (expected.current_epoch, expected.global_step)


def test_a_limit_that_is_still_reached(tmp_path: Path) -> None:
    """A run that max_steps ended does nothing when it is resumed with the same limit, and can be saved again."""
    path = tmp_path / "a.ckpt"
    make = LOADERS["shuffled"]
    first = fit(make(), max_steps=4, default_root_dir=tmp_path)
    first.save_checkpoint(path)
    second = fit(make(), path=path, max_steps=4, default_root_dir=tmp_path)
    second.save_checkpoint(path)
    assert second.lightning_module.seen == first.lightning_module.seen
    assert second.lightning_module.ended == first.lightning_module.ended
    assert second.current_epoch == first.current_epoch == 1
    third = fit(make(), path=path, max_epochs=1, max_steps=10, default_root_dir=tmp_path)
    expected = fit(make(), max_epochs=1, default_root_dir=tmp_path)
    assert third.lightning_module.seen == expected.lightning_module.seen
    assert torch.equal(weights(third), weights(expected))


# At the end


def averaging(folder: Path, files: float = float("inf")) -> list[Any]:
    """An average of the weights, and checkpoints at every epoch's end."""
    return [EMAWeightAveraging(decay=0.5), KillingCheckpoint(files, dirpath=folder, save_last=True)]


@pytest.mark.parametrize("hook", ["on_train_end", "on_train_epoch_end"])
def test_killed_behind_the_last_checkpoint(hook: str, tmp_path: Path) -> None:
    """The resumed run does what callbacks do at the end of training."""
    make = LOADERS["shuffled"]
    expected = fit(make(), averaging(tmp_path / "whole"), max_epochs=2)
    in_the_end = hook == "on_train_end"
    killers = [Kill(hook)] if in_the_end else []
    with pytest.raises(Killed):
        fit(make(), [*killers, *averaging(tmp_path / "part", float("inf") if in_the_end else 4)], max_epochs=2)
    last = tmp_path / "part" / "last.ckpt"
    resumed = fit(make(), averaging(tmp_path / "part"), last, max_epochs=2, seed=7)
    assert torch.equal(weights(resumed), weights(expected))
    assert resumed.lightning_module.ended == 1
    assert resumed.lightning_module.seen == expected.lightning_module.seen


def test_the_end_is_not_done_twice(tmp_path: Path) -> None:
    """Resuming a run that is complete writes nothing, and a checkpoint from after its end ends no second time."""
    make = LOADERS["shuffled"]
    first = fit(make(), averaging(tmp_path), max_epochs=2)
    last = tmp_path / "last.ckpt"
    written = last.read_bytes()
    second = fit(make(), averaging(tmp_path), last, max_epochs=2)
    assert torch.equal(weights(second), weights(first))
    assert last.read_bytes() == written
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch=1-step=20.ckpt", "last.ckpt"]
    first.save_checkpoint(tmp_path / "after.ckpt")
    third = fit(make(), averaging(tmp_path), tmp_path / "after.ckpt", max_epochs=2)
    assert third.lightning_module.ended == first.lightning_module.ended == 1
    assert torch.equal(weights(third), weights(first))


def stopping(folder: Path) -> list[Any]:
    """Stops after the second epoch, since `loss_epoch` has to fall by more than it can."""
    return [EarlyStopping("loss_epoch", patience=1, min_delta=1e6), keeper(folder)]


def test_a_run_that_early_stopping_has_ended(tmp_path: Path) -> None:
    """It has ended when it is resumed, too; without the callback it continues."""
    make = LOADERS["shuffled"]
    expected = fit(make(), stopping(tmp_path / "whole"), max_epochs=4)
    with pytest.raises(Killed):
        fit(make(), [Kill("on_train_end"), *stopping(tmp_path)], max_epochs=4)
    resumed = fit(make(), stopping(tmp_path), tmp_path / "last.ckpt", max_epochs=4)
    assert expected.current_epoch == resumed.current_epoch == 2
    assert torch.equal(weights(resumed), weights(expected))
    assert resumed.lightning_module.ended == 1
    with pytest.warns(UserWarning, match="states of callbacks"):
        longer = fit(make(), [keeper(tmp_path)], tmp_path / "last.ckpt", max_epochs=4)
    assert longer.current_epoch == 4


# Checkpoint callbacks


def test_a_step_is_not_saved_again_within_its_window(tmp_path: Path) -> None:
    """The best checkpoint of a step is that of the batch at which it was taken."""

    def checkpoints(folder: Path, at: float) -> list[Any]:
        options: dict[str, Any] = {"monitor": "descending", "every_n_train_steps": 1, "save_last": True}
        return [KillingCheckpoint(at, dirpath=folder, save_top_k=-1, **options)]

    def names(run: Any) -> dict[str, float]:
        return {Path(path).name: float(score) for path, score in run.checkpoint_callback.best_k_models.items()}

    make = LOADERS["shuffled"]
    options = {"max_epochs": 1, "accumulate_grad_batches": 3}
    expected = fit(make(), checkpoints(tmp_path / "whole", float("inf")), **options)
    for at in (2, 4, 6):
        folder = tmp_path / str(at)
        with pytest.raises(Killed):
            fit(make(), checkpoints(folder, at), **options)
        run = fit(make(), checkpoints(folder, float("inf")), folder / "last.ckpt", **options)
        assert names(run) == names(expected)
        assert (
            Path(run.checkpoint_callback.best_model_path).name
            == Path(expected.checkpoint_callback.best_model_path).name
        )


@pytest.mark.parametrize(
    "options",
    [{"every_n_train_steps": 5}, {"every_n_epochs": 1}, {"every_n_epochs": 1, "save_on_train_epoch_end": False}],
    ids=["on_train_batch_end", "on_train_epoch_end", "on_validation_end"],
)
def test_callbacks_behind_the_one_that_wrote_the_checkpoint(options: dict[str, Any], tmp_path: Path) -> None:
    """A run that was killed between two checkpoint callbacks of one hook lets the second do its part."""

    class Validated(Module):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.net(batch / SAMPLES).square().mean())

    def run(folder: Path, at: float, path: Path | None = None) -> Any:
        first = KillingCheckpoint(at, dirpath=folder, save_last=True, **options)
        second = ModelCheckpoint(folder / "second", "{step}", monitor="val_loss", save_top_k=-1, **options)
        data = [DataLoader(rows(), shuffle=True), DataLoader(rows())]
        torch.manual_seed(0)
        module = Validated()
        run = trainer(callbacks=[first, second], enable_checkpointing=True, max_epochs=3, val_check_interval=0.5)
        run.fit(module, *data, ckpt_path=path)
        return {Path(name).name: float(score) for name, score in second.best_k_models.items()}

    expected = run(tmp_path / "whole", float("inf"))
    folder = tmp_path / "part"
    with pytest.raises(Killed):
        run(folder, 4)
    assert run(folder, float("inf"), folder / "last.ckpt") == expected
    assert len(expected) > 2


# Rows


def table(folder: Path) -> list[dict[str, str]]:
    """The rows of a run."""
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def logged(folder: Path, *callbacks: Any, **options: Any) -> dict[str, Any]:
    """A CSV logger in a folder, and its callbacks."""
    logger = CSVLogger(folder, name="", version="")
    return {"logger": logger, "callbacks": [LearningRateMonitor("step"), *callbacks], "log_every_n_steps": 1, **options}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("at", range(1, 12))
def test_every_row_stands_in_the_file_once(at: int, tmp_path: Path) -> None:
    """Killed after any checkpoint, and some rows later, or at once."""
    make = LOADERS["shuffled"]
    interval = {"every_n_train_steps": 3} if at % 2 else {"every_n_epochs": 1}

    def run(folder: Path, *others: Any, files: float = float("inf"), path: Path | None = None) -> None:
        checkpoint = KillingCheckpoint(files, dirpath=folder, save_last=True, **interval)
        fit(make(), **logged(folder, *others, checkpoint), path=path, max_epochs=2, seed=1 if path is None else 7)

    run(tmp_path / "whole")
    folder = tmp_path / "part"
    at_once = at < 5
    killers = [] if at_once else [Kill("on_train_batch_end", at + 8)]
    with pytest.raises(Killed):
        run(folder, *killers, files=at + at % 2 if at_once else float("inf"))  # a file of the step, then last.ckpt
    run(folder, path=folder / "last.ckpt")
    assert table(folder) == table(tmp_path / "whole")
    assert not list(folder.glob("metrics_*.csv"))


def test_a_file_of_another_run_is_put_aside(tmp_path: Path) -> None:
    make = LOADERS["shuffled"]
    fit(make(), **logged(tmp_path / "a", keeper(tmp_path / "a")), max_epochs=2)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "metrics.csv").write_text("epoch,step\n0,1\n")
    fit(make(), **logged(tmp_path / "b", keeper(tmp_path / "b")), path=tmp_path / "a" / "last.ckpt", max_epochs=3)
    assert (tmp_path / "b" / "metrics_0.csv").read_text() == "epoch,step\n0,1\n"
    steps = [int(row["step"]) for row in table(tmp_path / "b") if not row["lr-Adam"]]
    assert steps == [19, *range(20, 30), 29]  # the epoch of the checkpoint had no row yet
