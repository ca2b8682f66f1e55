"""Ends of a run: epochs, steps, time, `should_stop`, errors and interrupts."""

from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Timer

from .. import data
from ..harness import Case, Record, parity
from ..modules import Classifier


class Stops(Classifier):
    """Asks for an end in the given step."""

    def __init__(self, step: int = 2) -> None:
        super().__init__()
        self.last_step = step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == self.last_step:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


class StopsOnce(Stops):
    """Asks for an end in the midst of an accumulation window."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.should_stop:
            self.last_step = -1
        return loss


class StopsAtEpochStart(Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.should_stop = trainer.current_epoch == 1


def fit_twice(trainer: Any, module: Any, given: Any) -> None:
    """Goes on with the same trainer."""
    trainer.fit(module, **given)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, **given)


class StopsAtBatchEnd(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 8:
            trainer.should_stop = True


class Fails(Classifier):
    """Raises in the given hook once training has continued for a while."""

    error: type[BaseException] = ArithmeticError
    hook = "training_step"

    def fail(self) -> None:
        if self.global_step >= 4:
            raise self.error("as asked")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.hook == "training_step":
            self.fail()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        if self.hook == "validation_step":
            self.fail()
        return super().validation_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        if self.hook == "on_train_epoch_end":
            self.fail()

    def setup(self, stage: str) -> None:
        if self.hook == "setup":
            raise self.error("as asked")


def fails(hook: str, error: type[BaseException] = ArithmeticError) -> Any:
    return type("Fails", (Fails,), {"hook": hook, "error": error})


def interrupted(trainer: Any, module: Any, given: Any) -> bool:
    """Lightning exits the process, Equipoise hands the interrupt on: both have cleaned up by then."""
    try:
        trainer.fit(module, **given)
    except (KeyboardInterrupt, SystemExit):
        return bool(trainer.interrupted)
    return False


def steps(record: Record) -> int:
    return int(record["counters"]["global_step"])


CASES = [
    Case(name="max-epochs", options={"max_epochs": 3}, proves=lambda r: r["counters"]["current_epoch"] == 3),
    Case(name="max-epochs-zero", options={"max_epochs": 0}, ignore=["generators"], proves=lambda r: steps(r) == 0),
    Case(name="max-steps-within-epoch", options={"max_epochs": None, "max_steps": 8}, proves=lambda r: steps(r) == 8),
    Case(name="max-steps-zero", options={"max_steps": 0}, ignore=["generators"], proves=lambda r: steps(r) == 0),
    Case(
        name="max-steps-with-accumulation",
        options={"max_epochs": -1, "max_steps": 4, "accumulate_grad_batches": 2},
        proves=lambda r: steps(r) == 4 and r["counters"]["current_epoch"] == 2,
    ),
    Case(name="should-stop-in-step", module=Stops, proves=lambda r: steps(r) == 3),
    Case(
        name="should-stop-at-epoch-start",
        callbacks=lambda: [StopsAtEpochStart()],
        options={"max_epochs": 4},
        proves=lambda r: steps(r) == 6,
    ),
    Case(name="fitted-twice", data=data.shuffled, run=fit_twice, proves=lambda r: steps(r) == 24),
    Case(
        name="stopped-in-a-window-and-fitted-again",
        module=StopsOnce,
        run=fit_twice,
        options={"accumulate_grad_batches": 3},
        proves=lambda r: steps(r) > 4,
    ),
    Case(name="should-stop-at-batch-end", callbacks=lambda: [StopsAtBatchEnd()], proves=lambda r: steps(r) == 8),
    Case(name="should-stop-but-min-epochs", module=Stops, options={"min_epochs": 2, "max_epochs": 4}),
    Case(
        name="should-stop-but-min-steps",
        module=Stops,
        options={"min_steps": 9, "max_epochs": 4},
        proves=lambda r: steps(r) == 9,
    ),
    Case(
        name="max-time-over-at-once",
        options={"max_time": {"seconds": 0}, "max_epochs": 50},
        ignore=["Timer", "generators"],
    ),
    Case(
        name="timer-by-epoch",
        callbacks=lambda: [Timer(duration={"microseconds": 1}, interval="epoch")],
        options={"max_epochs": 3},
        ignore=["Timer"],
        proves=lambda r: steps(r) == 6,
    ),
    Case(name="error-in-training-step", module=fails("training_step"), raises=ArithmeticError),
    Case(name="error-in-validation-step", module=fails("validation_step"), raises=ArithmeticError),
    Case(name="error-in-setup", module=fails("setup"), raises=ArithmeticError),
    Case(name="system-exit", module=fails("training_step", SystemExit), raises=SystemExit),
    Case(
        name="keyboard-interrupt",
        module=fails("training_step", KeyboardInterrupt),
        run=interrupted,
        proves=lambda r: r["returned"],
    ),
]

test_parity = parity(CASES)
