"""The callback interface: Lightning's hooks and ours, with a drawing of the loop that calls them.

Lightning's hooks, with its names, order and arguments; callbacks come before the module, and a checkpoint callback
comes last. The loop that fires them:

    setup
    on_fit_start
    (on_sanity_check_start, a few validation batches as below, on_sanity_check_end)
    on_train_start
    for each epoch:
        on_train_epoch_start
        for each batch:
            on_before_batch_to_device          ours: the batch was read
            on_train_batch_start               it lies on its devices
                training_step
                on_before_zero_grad            first batch of an accumulation window
                on_before_backward
                on_after_backward
                on_before_optimizer_step       last batch of a window; gradients are summed, weighed and unscaled
            on_train_batch_end                 gradients are still there
            where validation is due:
                on_validation_start
                on_validation_epoch_start
                for each batch: on_validation_batch_start, validation_step, on_validation_batch_end
                on_validation_epoch_end
                on_validation_end
        on_train_epoch_end
    on_train_end
    on_fit_end
    teardown

`validate`, `test` and `predict` run the inner part alone, under their own names. `on_exception` fires when a run
fails or is interrupted, `on_out_of_memory` when a batch does not fit.
"""

from typing import TYPE_CHECKING

from lightning.pytorch import LightningModule

from equipoise.memory.out_of_memory import OutOfMemoryEvent, Split

if TYPE_CHECKING:
    from equipoise.callbacks.declared_hooks import DeclaredHooks as _LightningCallback
    from equipoise.trainer.trainer import Trainer
else:
    from lightning.pytorch import Callback as _LightningCallback

__all__ = ["Callback"]


class Callback(_LightningCallback):
    """Base class of callbacks: override the hooks you need, leave the others alone. An unused hook costs nothing.

    Every hook receives the trainer and the module first. A callback written for Lightning works here and the other
    way round.

    Attributes:
        fires_without_batch: Whether `on_train_batch_end` is called also in a process that has no batch in a step while
            others have, with `{}` for outputs and None for the batch. For callbacks that talk to the other processes in
            it, which would wait for this one. Default: False.
        uses_outputs: Whether `on_train_batch_end` looks at `outputs`. Where nobody does they are not made, and `{}` is
            handed over. Default: True.

    Example:
        >>> from equipoise import Callback
        >>> class PrintLoss(Callback):
        ...     def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        ...         if batch_idx % 100 == 0:
        ...             trainer.print(f"step {trainer.global_step}: loss {outputs['loss']:.3f}")
    """

    fires_without_batch: bool = False
    uses_outputs: bool = True

    def on_before_batch_to_device(self, trainer: "Trainer", pl_module: LightningModule, batch_idx: int) -> None:
        """A training batch was read and is about to be copied to its devices; Lightning's Trainer does not tell.

        Args:
            trainer: The trainer.
            pl_module: The user's module.
            batch_idx: The number of the batch.
        """

    def on_out_of_memory(
        self, trainer: "Trainer", pl_module: LightningModule, event: OutOfMemoryEvent
    ) -> int | Split | None:
        """A batch ran out of memory; called in the process where it did, before anything is done about it.

        A trainer of which any callback overrides this notes in each step how everything was before it, to be able to do
        the step again.

        Args:
            trainer: The trainer.
            pl_module: The user's module.
            event: What happened.

        Returns:
            In how many parts the batch is to be computed, a number or a `Split`; 0 to leave it out; None to raise the
            error. The first callback that does not return None decides. Where the optimiser's step ran out, any number
            but 0 means once more. Where `event.can_repeat` is False the error is raised whatever is returned.
        """
        return None
