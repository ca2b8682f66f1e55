"""Lightning's ModelCheckpoint in its modes: names, contents and number of the files."""

from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from .. import data
from ..harness import Case, Record, parity
from ..modules import Classifier


class Waves(Classifier):
    """Logs values that rise and fall, so that the best epoch is not the last one."""

    values = (0.5, 0.2, 0.4, 0.1, 0.3, 0.6)

    def on_validation_epoch_end(self) -> None:
        index = 0 if self.trainer.sanity_checking else self.current_epoch
        self.log("wave", self.values[index])
        self.log("nested/wave", 10 * self.values[index])

    def on_train_epoch_end(self) -> None:
        self.log("train_wave", self.values[self.current_epoch])


class Breaks(Waves):
    """Fails in the second epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 8:
            raise ArithmeticError("as asked")
        return super().training_step(batch, batch_idx)


class NotANumber(Waves):
    values = (0.5, float("nan"), 0.4, float("nan"), 0.3, 0.6)


def saving(**options: Any) -> Any:
    return lambda: [ModelCheckpoint(**options)]


def several() -> list[Any]:
    return [
        ModelCheckpoint(monitor="wave", filename="wave-{epoch}"),
        ModelCheckpoint(monitor="train_wave", mode="max", filename="train-{epoch}-{step}"),
        ModelCheckpoint(every_n_train_steps=5, save_top_k=-1, filename="steps-{step}"),
    ]


def checkpoints(record: Record) -> set[str]:
    return {Path(name).name for name in record["files"] if name.endswith(".ckpt")}


def best(trainer: Any) -> Any:
    attributes = (
        "best_model_path",
        "best_model_score",
        "current_score",
        "kth_best_model_path",
        "best_k_models",
        "last_model_path",
    )
    return [{name: getattr(callback, name) for name in attributes} for callback in trainer.checkpoint_callbacks]


def saved_by_hand(trainer: Any, module: Any, given: Any) -> None:
    trainer.fit(module, **given)
    trainer.save_checkpoint("whole.ckpt")
    trainer.save_checkpoint("weights.ckpt", weights_only=True)


def case(
    name: str, callbacks: Any, module: Any = Waves, epochs: int = 4, expected: set[str] | None = None, **options: Any
) -> Case:
    options = {"max_epochs": epochs, "limit_train_batches": 3, **options}
    proves = None if expected is None else lambda r: checkpoints(r) == expected
    return Case(name=name, module=module, callbacks=callbacks, options=options, observe=best, proves=proves)


CASES = [
    case("default", tuple, expected={"epoch=3-step=12.ckpt"}),
    case("off", tuple, expected=set(), enable_checkpointing=False),
    case(
        "best-two",
        saving(monitor="wave", save_top_k=2),
        epochs=5,
        expected={"epoch=3-step=12.ckpt", "epoch=1-step=6.ckpt"},
    ),
    case("monitor-not-a-number", saving(monitor="wave", save_top_k=2), NotANumber),
    case("last-too", saving(monitor="wave", mode="max", save_last=True), expected={"epoch=0-step=3.ckpt", "last.ckpt"}),
    case("last-as-link", saving(monitor="wave", save_last="link")),
    case(
        "every-second-epoch",
        saving(every_n_epochs=2, save_top_k=-1),
        epochs=5,
        expected={"epoch=1-step=6.ckpt", "epoch=3-step=12.ckpt"},
    ),
    case(
        "every-four-steps",
        saving(every_n_train_steps=4, save_top_k=-1),
        expected={f"epoch={e}-step={s}.ckpt" for e, s in ((1, 4), (2, 8), (3, 12))},
    ),
    case("every-step-accumulating", saving(every_n_train_steps=1, save_top_k=-1), accumulate_grad_batches=3),
    case("on-training-epoch-end", saving(monitor="train_wave", save_on_train_epoch_end=True, save_top_k=2)),
    case(
        "on-validation-end", saving(monitor="wave", save_on_train_epoch_end=False, save_top_k=-1), val_check_interval=1
    ),
    case("by-time-at-every-step", saving(train_time_interval=timedelta(0), save_top_k=-1)),
    case("several", several),
    Case(
        name="saved-by-hand",
        module=Waves,
        run=saved_by_hand,
        proves=lambda r: {"whole.ckpt", "weights.ckpt"} <= checkpoints(r),
    ),
    Case(
        name="without-validation", module=Classifier, data=lambda: {"train_dataloaders": data.loader(3)}, observe=best
    ),
    Case(
        name="after-an-error",
        module=Breaks,
        callbacks=saving(save_on_exception=True, monitor="wave"),
        raises=ArithmeticError,
        proves=lambda r: len(checkpoints(r)) == 2,
    ),
    Case(
        name="after-an-error-by-callback",
        module=Breaks,
        callbacks=lambda: [OnExceptionCheckpoint("failed")],
        raises=ArithmeticError,
        proves=lambda r: "on_exception.ckpt" in checkpoints(r),
    ),
]

test_parity = parity(CASES)
