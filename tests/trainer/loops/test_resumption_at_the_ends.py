"""Resumptions at the edges of a run: in an epoch that a limit cut short, after the last batch, between two rows."""

import csv
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.parity.resumption import Resumable
from tests.support.equality import assert_equal
from tests.support.resumption import Kill, Killed, KillingCheckpoint, SavesInHooks
from tests.support.trainer_runs import trainer

pytestmark = pytest.mark.filterwarnings("ignore:Experiment logs")

SAMPLES = 10


class Dropping(L.LightningModule):
    """Logs steps, epochs and validations; drops out."""

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

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch / SAMPLES).square().mean())

    def on_train_end(self) -> None:
        self.ended += 1

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def shuffled(**options: Any) -> DataLoader[Any]:
    rows = list(torch.arange(SAMPLES, dtype=torch.float64).unsqueeze(1))
    return DataLoader(rows, **{"shuffle": True, **options})  # type: ignore[arg-type]


def fit(
    *callbacks: Any, path: Path | None = None, loader: Any = None, kind: type[Dropping] = Dropping, **options: Any
) -> Any:
    """Train, from a checkpoint with other random numbers; return the trainer."""
    torch.manual_seed(0)
    module = kind()
    torch.manual_seed(1 if path is None else 7)
    options = {"limit_val_batches": 0, "enable_checkpointing": True, **options}
    run = trainer(callbacks=list(callbacks), **options)
    run.fit(module, loader or shuffled(), shuffled(shuffle=False), ckpt_path=path)
    return run


def end_of(run: Any) -> Any:
    """The weights, samples, number of ends and counters, which must be the same."""
    module = run.lightning_module
    return module, module.seen, module.ended, run.current_epoch, run.global_step


# In the midst of an epoch


class Estimates(Dropping):
    def configure_optimizers(self) -> Any:
        self.estimate = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


def test_a_loader_with_state_dict_continues_at_its_place_where_steps_are_estimated(tmp_path: Path) -> None:
    """The estimate asks for the loader before the run is resumed."""
    saves = SavesInHooks(tmp_path, ["on_train_batch_end"], calls=[4])
    options: dict[str, Any] = {"kind": Estimates, "enable_checkpointing": False}
    whole = fit(saves, loader=Resumable(SAMPLES, 1), **options)
    resumed = fit(path=tmp_path / "on_train_batch_end-04.ckpt", loader=Resumable(SAMPLES, 1), **options)
    assert whole.lightning_module.estimate == resumed.lightning_module.estimate == SAMPLES
    assert_equal(end_of(whole), end_of(resumed))


@pytest.mark.parametrize("how", ["by a callback", "afterwards"])
def test_a_run_that_max_steps_ended_within_an_epoch_continues_in_that_epoch(how: str, tmp_path: Path) -> None:
    """With a higher limit, no sample of the epoch is lost or seen again, and its values are those of all of it."""

    def ends(folder: str, steps: int, path: Path | None = None) -> Any:
        keeper = ModelCheckpoint(tmp_path / folder, save_last=True)
        return fit(keeper, path=path, max_steps=steps, max_epochs=-1, accumulate_grad_batches=2)

    expected, first = ends("whole", 8), ends("part", 2)
    path = tmp_path / "part" / "last.ckpt"
    if how == "afterwards":
        first.save_checkpoint(path := tmp_path / "after.ckpt")
    resumed = ends("part", 8, path)
    assert_equal(end_of(expected)[:2], end_of(resumed)[:2])
    assert_equal(end_of(expected)[3:], end_of(resumed)[3:])
    assert_equal(expected.callback_metrics["loss_epoch"], resumed.callback_metrics["loss_epoch"])


def test_a_limit_that_is_still_reached_trains_nothing(tmp_path: Path) -> None:
    """Resumed with the same limit, the run does nothing, and can be saved again; with a higher one it goes on."""
    path = tmp_path / "a.ckpt"
    first = fit(max_steps=4, default_root_dir=tmp_path)
    first.save_checkpoint(path)
    second = fit(path=path, max_steps=4, default_root_dir=tmp_path)
    second.save_checkpoint(path)
    assert second.current_epoch == 1
    assert_equal(end_of(first), end_of(second))
    third = fit(path=path, max_steps=10, default_root_dir=tmp_path)
    assert_equal(end_of(fit(default_root_dir=tmp_path))[:2], end_of(third)[:2])


# At the end


def averaging(folder: Path, files: float = float("inf")) -> list[Any]:
    """An average of the weights, and checkpoints at every epoch's end; the run is killed behind so many."""
    return [EMAWeightAveraging(decay=0.5), KillingCheckpoint(folder, files)]


@pytest.mark.parametrize(("hooks", "files"), [(["on_train_end"], float("inf")), ([], 4)])
def test_on_train_end_of_a_run_killed_after_its_last_batch_is_called_once_and_averages_are_used(
    hooks: list[str], files: float, tmp_path: Path
) -> None:
    expected = fit(*averaging(tmp_path / "whole"), max_epochs=2)
    with pytest.raises(Killed):
        fit(*map(Kill, hooks), *averaging(tmp_path / "part", files), max_epochs=2)
    resumed = fit(*averaging(tmp_path / "part"), path=tmp_path / "part" / "last.ckpt", max_epochs=2)
    assert_equal(end_of(expected), end_of(resumed))
    assert resumed.lightning_module.ended == 1


class Validates(Dropping):
    """Counts its validations, by which a schedule steps."""

    validations = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.validations += 1

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1e6)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


@pytest.mark.parametrize(
    ("hook", "call"), [("on_train_batch_end", SAMPLES), ("on_validation_end", 1), ("on_train_epoch_end", 1)]
)
def test_a_validation_and_a_plateau_that_remain_after_a_checkpoint_are_done(
    hook: str, call: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"kind": Validates, "limit_val_batches": 0.1, "max_epochs": 2}
    options |= {"num_sanity_val_steps": 0, "enable_checkpointing": False}
    whole = fit(SavesInHooks(tmp_path, [hook], calls=[call]), **options)
    resumed = fit(path=tmp_path / f"{hook}-{call:02d}.ckpt", **options)
    assert resumed.lightning_module.validations == 2
    assert resumed.optimizers[0].param_groups[0]["lr"] == whole.optimizers[0].param_groups[0]["lr"] == 0.1 * 0.5**2
    assert_equal(end_of(whole), end_of(resumed))


def test_the_end_is_not_done_twice(tmp_path: Path) -> None:
    """Resuming a run that is complete writes nothing, and a checkpoint from after its end ends no second time."""
    first = fit(*averaging(tmp_path), max_epochs=2)
    last = tmp_path / "last.ckpt"
    written = last.read_bytes()
    second = fit(*averaging(tmp_path), path=last, max_epochs=2)
    assert_equal(first.lightning_module, second.lightning_module)
    assert last.read_bytes() == written
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch=1-step=20.ckpt", "last.ckpt"]
    first.save_checkpoint(tmp_path / "after.ckpt")
    third = fit(*averaging(tmp_path), path=tmp_path / "after.ckpt", max_epochs=2)
    assert_equal(end_of(first), end_of(third))


def test_a_run_that_early_stopping_has_ended_stays_ended(tmp_path: Path) -> None:
    """When it is resumed, too; without the callback it continues."""

    def stopping(folder: Path) -> list[Any]:
        # `loss_epoch` has to fall by more than it can.
        return [EarlyStopping("loss_epoch", patience=1, min_delta=1e6), KillingCheckpoint(folder)]

    expected = fit(*stopping(tmp_path / "whole"), max_epochs=4)
    with pytest.raises(Killed):
        fit(Kill("on_train_end"), *stopping(tmp_path), max_epochs=4)
    resumed = fit(*stopping(tmp_path), path=tmp_path / "last.ckpt", max_epochs=4)
    assert resumed.current_epoch == 2
    assert_equal(end_of(expected), end_of(resumed))
    with pytest.warns(UserWarning, match="states of callbacks"):
        assert fit(KillingCheckpoint(tmp_path), path=tmp_path / "last.ckpt", max_epochs=4).current_epoch == 4


# Checkpoint callbacks


def values_of_files(keeper: Any) -> dict[str, float]:
    """The best files by name, with their values."""
    return {Path(path).name: float(score) for path, score in keeper.best_k_models.items()}


def test_a_step_is_not_saved_again_within_its_accumulation_window(tmp_path: Path) -> None:
    """The best checkpoint of a step is that of the batch at which it was taken."""

    def ends(folder: Path, at: float = float("inf"), path: Path | None = None) -> Any:
        keeper = KillingCheckpoint(folder, at, monitor="descending", every_n_train_steps=1, save_top_k=-1)
        fit(keeper, path=path, accumulate_grad_batches=3)
        return values_of_files(keeper), Path(keeper.best_model_path).name

    expected = ends(tmp_path / "whole")
    for at in (2, 4, 6):
        with pytest.raises(Killed):
            ends(folder := tmp_path / str(at), at)
        assert ends(folder, path=folder / "last.ckpt") == expected


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [{"every_n_train_steps": 5}, {"every_n_epochs": 1}, {"every_n_epochs": 1, "save_on_train_epoch_end": False}],
    ids=["on_train_batch_end", "on_train_epoch_end", "on_validation_end"],
)
def test_a_checkpoint_callback_behind_the_one_that_wrote_the_file_does_its_part(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """In a run that was killed between two checkpoint callbacks of one hook."""

    def ends(folder: Path, at: float = float("inf"), path: Path | None = None) -> Any:
        second = ModelCheckpoint(folder / "second", "{step}", monitor="val_loss", save_top_k=-1, **options)
        validated = {"val_check_interval": 0.5, "limit_val_batches": 1.0}
        fit(KillingCheckpoint(folder, at, **options), second, path=path, max_epochs=3, **validated)
        return values_of_files(second)

    expected, folder = ends(tmp_path / "whole"), tmp_path / "part"
    with pytest.raises(Killed):
        ends(folder, 4)
    assert ends(folder, path=folder / "last.ckpt") == expected
    assert len(expected) > 2


# Rows


def table(folder: Path) -> list[dict[str, str]]:
    """The rows of a run."""
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def logged(folder: Path, *callbacks: Any, **options: Any) -> Any:
    """A run with a CSV logger in a folder."""
    logger = CSVLogger(folder, name="", version="")
    return fit(LearningRateMonitor("step"), *callbacks, logger=logger, log_every_n_steps=1, **options)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("every", "files", "batch"),
    [
        # Killed as soon as a file is written: of a step, then last.ckpt.
        ({"every_n_train_steps": 3}, 2, 0),
        ({"every_n_epochs": 1}, 4, 0),
        # Killed some rows later.
        ({"every_n_train_steps": 3}, float("inf"), 19),
        ({"every_n_epochs": 1}, float("inf"), 14),
    ],
)
def test_every_row_of_metrics_csv_appears_once_in_a_resumed_run(
    every: dict[str, int], files: float, batch: int, tmp_path: Path
) -> None:
    logged(tmp_path / "whole", KillingCheckpoint(tmp_path / "whole", **every), max_epochs=2)
    folder = tmp_path / "part"
    kill = Kill("on_train_batch_end", batch)
    with pytest.raises(Killed):
        logged(folder, kill, KillingCheckpoint(folder, files, **every), max_epochs=2)
    logged(folder, KillingCheckpoint(folder, **every), path=folder / "last.ckpt", max_epochs=2)
    assert table(folder) == table(tmp_path / "whole")
    assert not list(folder.glob("metrics_*.csv"))


def test_a_csv_file_of_another_run_is_put_aside(tmp_path: Path) -> None:
    logged(tmp_path / "a", KillingCheckpoint(tmp_path / "a"), max_epochs=2)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "metrics.csv").write_text("epoch,step\n0,1\n")
    logged(tmp_path / "b", KillingCheckpoint(tmp_path / "b"), path=tmp_path / "a" / "last.ckpt", max_epochs=3)
    assert (tmp_path / "b" / "metrics_0.csv").read_text() == "epoch,step\n0,1\n"
    steps = [int(row["step"]) for row in table(tmp_path / "b") if not row["lr-Adam"]]
    assert steps == [19, *range(20, 30), 29]  # the epoch of the checkpoint had no row yet
