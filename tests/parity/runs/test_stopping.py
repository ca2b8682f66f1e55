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


class Fails(Classifier):
    """Raises once training has continued for a while."""

    error: type[BaseException] = ArithmeticError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step >= 4:
            raise self.error("as asked")
        return super().training_step(batch, batch_idx)


class Interrupted(Fails):
    error = KeyboardInterrupt


class FailsInSetup(Classifier):
    def setup(self, stage: str) -> None:
        raise ArithmeticError("as asked")


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
    Case(name="max-epochs-zero", options={"max_epochs": 0}, ignore=["generators"], proves=lambda r: steps(r) == 0),
    Case(name="max-steps-within-epoch", options={"max_epochs": None, "max_steps": 8}, proves=lambda r: steps(r) == 8),
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
    Case(name="error-in-training-step", module=Fails, raises=ArithmeticError),
    Case(name="error-in-setup", module=FailsInSetup, raises=ArithmeticError),
    Case(
        name="keyboard-interrupt",
        module=Interrupted,
        run=interrupted,
        proves=lambda r: r["returned"],
    ),
]

test_parity = parity(CASES)
