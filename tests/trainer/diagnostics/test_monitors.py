"""Values that callbacks and schedulers monitor: a name that nobody logs is found, and no other one is refused."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from equipoise.errors import ConfigurationError
from tests.support.trainer_runs import Small, Validated, loader, refuses, trainer


class Logging(Small):
    """Logs values under any names: in the validation, in each training step, and at the end of training epochs."""

    def __init__(self, validated: list[str], trained: Sequence[str] = (), at_end: Sequence[str] = ()) -> None:
        super().__init__()
        self.names = validated, trained, at_end
        self.watched: dict[str, Any] | None = None  # by a ReduceLROnPlateau

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log_dict(dict.fromkeys(self.names[1], 1.0))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log_dict(dict.fromkeys(self.names[0], 1.0))

    def on_train_epoch_end(self) -> None:
        self.log_dict(dict.fromkeys(self.names[2], 1.0))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if self.watched is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": ReduceLROnPlateau(optimizer), **self.watched}}


def fit(kind: Any, monitor: str, module: Logging, folder: Path, loaders: int = 1, **options: Any) -> Any:
    """Train with something that monitors a value; return the trainer."""
    callbacks = []
    if kind is ModelCheckpoint:
        callbacks.append(ModelCheckpoint(folder, monitor=monitor))
    elif kind is EarlyStopping:
        callbacks.append(EarlyStopping(monitor))
    else:
        module.watched = {"monitor": monitor}
    run = trainer(callbacks=callbacks, enable_checkpointing=True, default_root_dir=folder, **options)
    run.fit(module, loader(), [loader() for _ in range(loaders)])
    return run


@pytest.mark.parametrize(
    ("kind", "logged", "monitor"),
    [
        (EarlyStopping, "val/loss", "val_loss"),
        (ModelCheckpoint, "val_loss", "val/loss"),
        (ReduceLROnPlateau, "val_loss", "valLoss"),
        (EarlyStopping, "Val.F1", "val_f1"),
        (ModelCheckpoint, "val_loss", "val_los"),
    ],
)
def test_a_mistyped_monitor_is_refused_before_the_first_step(
    kind: Any, logged: str, monitor: str, tmp_path: Path
) -> None:
    module = Logging([logged, "other"])
    parts = [f"{kind.__name__} monitors {monitor!r}", f"did you mean {logged!r}?", "num_sanity_val_steps=0"]
    refuses(lambda: fit(kind, monitor, module, tmp_path), *parts)
    assert "training" not in module.ran


def test_a_monitor_that_several_loaders_share_is_refused(tmp_path: Path) -> None:
    module = Logging(["val_loss"])
    parts = ["monitors 'val_loss'", "did you mean 'val_loss/dataloader_idx_0'?"]
    refuses(lambda: fit(ModelCheckpoint, "val_loss", module, tmp_path, loaders=2), *parts)
    assert "training" not in module.ran
    assert fit(ModelCheckpoint, "val_loss/dataloader_idx_1", module, tmp_path, loaders=2).global_step == 3


@pytest.mark.parametrize(
    ("kind", "validated", "trained", "at_end", "monitor"),
    [
        (ModelCheckpoint, ["v_loss"], ["t_loss"], [], "t_loss"),
        (ReduceLROnPlateau, ["vloss"], [], [], "loss"),
        (EarlyStopping, ["loss_2"], ["loss_1"], [], "loss_1"),
        (ModelCheckpoint, ["val_acc"], [], ["val_auc"], "val_auc"),
        (EarlyStopping, ["val_loss"], [], ["val_loss_mean"], "val_loss_mean"),
        (ModelCheckpoint, ["val_loss", "val/loss"], [], [], "val/loss"),
    ],
)
def test_a_value_that_is_logged_later_is_no_false_alarm(
    kind: Any, validated: list[str], trained: list[str], at_end: list[str], monitor: str, tmp_path: Path
) -> None:
    run = fit(kind, monitor, Logging(validated, trained, at_end), tmp_path)
    assert run.global_step == 3


def test_a_value_of_the_same_letters_that_is_logged_later_needs_no_check(tmp_path: Path) -> None:
    run = fit(ModelCheckpoint, "val_loss", Logging(["val/loss"], [], ["val_loss"]), tmp_path, num_sanity_val_steps=0)
    assert run.checkpoint_callback.best_model_score == 1


def test_callbacks_that_may_find_their_value_elsewhere_are_not_refused(tmp_path: Path) -> None:
    class Renaming(ModelCheckpoint):
        def _monitor_candidates(self, trainer: Any) -> dict[str, Tensor]:
            values = super()._monitor_candidates(trainer)
            return {name.replace("/", "_"): value for name, value in values.items()}

    callbacks: list[Callback] = [Renaming(tmp_path, monitor="val_loss"), EarlyStopping("val_loss", strict=False)]
    run = trainer(callbacks=callbacks, enable_checkpointing=True)
    run.fit(Logging(["val/loss"]), loader(), loader())
    assert len(list(tmp_path.iterdir())) == 1


def test_all_processes_refuse_a_monitor_together() -> None:
    """The main process alone logs the value that decides."""

    class Main(Logging):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

        def on_validation_epoch_end(self) -> None:
            if self.global_rank == 0:
                self.log("val/loss", 1.0, rank_zero_only=True)

    run = trainer(callbacks=[EarlyStopping("val_loss")], strategy="ddp", devices=2)
    with pytest.raises(ConfigurationError, match="did you mean 'val/loss'"):
        run.fit(Main([]), loader(), DataLoader(torch.ones(2, 2)))


# After the first epoch


@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_reduce_on_plateau_watches_what_was_never_logged(interval: str) -> None:
    module = Logging([])
    module.watched = {"monitor": "accuracy", "interval": interval}
    parts = ["ReduceLROnPlateau monitors 'accuracy'", "no such value was logged; there are: loss", "'strict': False"]
    refuses(lambda: trainer().fit(module, loader(), loader()), *parts)


def test_a_plateau_that_is_not_strict_warns() -> None:
    module = Logging([])
    module.watched = {"monitor": "los", "strict": False}
    with pytest.warns(RuntimeWarning, match="monitors 'los'.*did you mean 'loss'.*stays as it is"):
        trainer().fit(module, loader(), loader())


def test_early_stopping_watches_what_was_never_logged() -> None:
    run = trainer(callbacks=[EarlyStopping("accuracy")])
    refuses(lambda: run.fit(Validated(), loader(), loader()), "monitors 'accuracy'", "there are: loss, val_loss.")


def test_early_stopping_that_does_not_look_yet() -> None:
    class Patient(EarlyStopping):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None: ...

    run = trainer(callbacks=[Patient("accuracy")])
    run.fit(Validated(), loader(), loader())
    run = trainer(callbacks=[EarlyStopping("val_loss")], limit_val_batches=0, check_val_every_n_epoch=5)
    run.fit(Validated(), loader(), loader())  # it would look after a validation
    assert run.global_step > 0


@pytest.mark.parametrize("at_epoch_end", [True, False])
def test_model_checkpoint_watches_what_was_never_logged(tmp_path: Path, at_epoch_end: bool) -> None:
    keeper = ModelCheckpoint(tmp_path, monitor="accuracy", save_on_train_epoch_end=at_epoch_end)
    with pytest.raises(MisconfigurationException, match=r"'accuracy'.*could not find .*'loss', 'val_loss'"):
        trainer(callbacks=[keeper], enable_checkpointing=True).fit(Validated(), loader(), loader())
    assert not list(tmp_path.iterdir())
