"""`self.log` from every hook that allows it, of modules and callbacks, and the errors from those that do not."""

from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from .harness import Case, columns, parity
from .modules import Classifier

BY_STEP = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
)
BY_STEP_TOO = ("on_before_optimizer_step", "on_validation_batch_start", "on_validation_batch_end")
BY_EPOCH = (
    "on_train_start",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
)
FORBIDDEN = (
    "setup",
    "on_fit_start",
    "on_train_end",
    "on_validation_end",
    "on_fit_end",
    "teardown",
    "on_save_checkpoint",
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


def more(hook: str) -> type[Any]:
    """Logs in a hook at its step and its epoch."""
    return logging_hooks(Classifier, [hook], on_step=True, on_epoch=True)


class InSteps(Classifier):
    """Logs through methods that its steps and hooks call."""

    def report(self, name: str) -> None:
        self.log(f"{name}_epoch_number", float(self.current_epoch))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.report("train")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.report("val")

    def on_train_epoch_end(self) -> None:
        self.log_dict({"end_a": 1.0, "end_b": 2.0}, prog_bar=True)


class ReadsMetrics(Classifier):
    """Computes new values from those the trainer holds, and logs them."""

    def on_validation_epoch_end(self) -> None:
        self.log("val_loss_twice", 2 * self.trainer.callback_metrics["val_loss"])

    def on_train_epoch_end(self) -> None:
        metrics = self.trainer.callback_metrics
        self.log("gap", metrics["train_loss_step"] - metrics["val_loss"])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("loss_again", outputs["loss"], on_step=True, on_epoch=True)


class Optimisation(Classifier):
    """Logs inside overrides of the optimisation step."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.log("in_optimizer_step", float(batch_idx))

    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        loss.backward()
        self.log("in_backward", loss.detach())

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.log("in_clipping", 1.0)


class DirectToLogger(Classifier):
    """Writes to the logger itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.logger.log_metrics({"direct": float(batch_idx)}, step=self.global_step)
        return super().training_step(batch, batch_idx)

    def on_fit_start(self) -> None:
        self.logger.log_hyperparams({"from_hook": 3})


class LogsThroughModule(Callback):
    """A callback that logs through the module, from a hook of its own."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.log("through_module", float(batch_idx), on_step=True, on_epoch=True)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("through_module_val", 1.0)


HOOKS = [*BY_STEP, *BY_STEP_TOO, *BY_EPOCH]

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
        name="module-hooks-by-step-and-epoch",
        module=logging_hooks(Classifier, [*BY_STEP, *BY_STEP_TOO], on_step=True, on_epoch=True),
    ),
    Case(
        name="callback-hooks-by-step-and-epoch",
        callbacks=lambda: [
            logging_hooks(Callback, [*BY_STEP, *BY_STEP_TOO], on_step=True, on_epoch=True, prog_bar=True)()
        ],
        options={"accumulate_grad_batches": 2, "log_every_n_steps": 2},
    ),
    Case(name="helper-methods", module=InSteps),
    Case(name="reads-metrics", module=ReadsMetrics),
    Case(name="optimisation-step", module=Optimisation),
    Case(name="direct-to-logger", module=DirectToLogger),
    Case(name="callback-through-module", callbacks=lambda: [LogsThroughModule()]),
    *(
        Case(
            name=f"forbidden-in-module-{hook}",
            module=logging_hooks(Classifier, [hook]),
            raises=MisconfigurationException,
        )
        for hook in FORBIDDEN
    ),
    *(
        Case(
            name=f"forbidden-in-callback-{hook}",
            callbacks=lambda hook=hook: [logging_hooks(Callback, [hook])()],
            raises=MisconfigurationException,
        )
        for hook in ("on_train_end", "on_sanity_check_end")
    ),
    *(
        Case(name=f"no-step-value-in-{hook}", module=more(hook), raises=MisconfigurationException)
        for hook in ("on_train_epoch_end", "on_validation_epoch_start")
    ),
    Case(
        name="forbidden-in-predict-step",
        module=logging_hooks(Classifier, ["predict_step"]),
        run=lambda trainer, module, given: trainer.predict(module, given["val_dataloaders"]),
        raises=MisconfigurationException,
    ),
]

test_parity = parity(CASES)
