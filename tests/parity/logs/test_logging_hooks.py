"""`self.log` from every hook that allows it, of modules and callbacks, and the errors from those that do not."""

from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from ..harness import Case, columns, parity
from ..modules import Classifier

BY_STEP = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_validation_batch_start",
    "on_validation_batch_end",
)
BY_EPOCH = (
    "on_train_start",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
)


def logging_hooks(base: type[Any], hooks: Sequence[str], **options: Any) -> type[Any]:
    """A subclass that logs a value named after each of the hooks; of a module or of a callback."""

    def make(hook: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls = getattr(self, "calls", 0) + 1
            self.log(f"{base.__name__}.{hook}", float(self.calls), **options)
            return getattr(super(cls, self), hook)(*args, **kwargs)

        return method

    cls = type(f"Logs{base.__name__}", (base,), {hook: make(hook) for hook in hooks})
    return cls


class ReadsMetrics(Classifier):
    """Computes new values from those the trainer holds, and logs them."""

    def on_validation_epoch_end(self) -> None:
        self.log("val_loss_twice", 2 * self.trainer.callback_metrics["val_loss"])

    def on_train_epoch_end(self) -> None:
        metrics = self.trainer.callback_metrics
        self.log("gap", metrics["train_loss_step"] - metrics["val_loss"])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("loss_again", outputs["loss"], on_step=True, on_epoch=True)


HOOKS = [*BY_STEP, *BY_EPOCH]

CASES = [
    Case(
        name="module-hooks",
        module=logging_hooks(Classifier, HOOKS),
        proves=lambda r: {f"Classifier.{hook}" for hook in HOOKS} <= columns(r),
    ),
    Case(
        name="callback-hooks",
        callbacks=lambda: [logging_hooks(Callback, HOOKS)()],
        proves=lambda r: {f"Callback.{hook}" for hook in HOOKS} <= columns(r),
    ),
    Case(
        name="callback-hooks-by-step-and-epoch",
        callbacks=lambda: [logging_hooks(Callback, BY_STEP, on_step=True, on_epoch=True, prog_bar=True)()],
        options={"accumulate_grad_batches": 2, "log_every_n_steps": 2},
    ),
    Case(name="reads-metrics", module=ReadsMetrics),
    # tests/trainer/logging/test_arguments.py has the table of all hooks.
    Case(
        name="forbidden-in-module",
        module=logging_hooks(Classifier, ["on_fit_start"]),
        raises=MisconfigurationException,
    ),
]

test_parity = parity(CASES)
