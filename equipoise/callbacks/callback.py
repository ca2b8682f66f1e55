"""The callback interface.

Lightning's hooks, with its names, order and arguments; callbacks come before the module, and a checkpoint callback
comes last. The loop that fires them:

    setup
    on_fit_start
    (on_sanity_check_start, a few validation batches as below, on_sanity_check_end)
    on_train_start
    for each epoch:
        on_train_epoch_start
        for each batch:
            on_train_batch_start
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
fails or is interrupted.
"""

from lightning.pytorch import Callback as _LightningCallback

__all__ = ["Callback"]


class Callback(_LightningCallback):
    """Base class of callbacks: override the hooks you need, leave the others alone. An unused hook costs nothing.

    Every hook receives the trainer and the module first. A callback written for Lightning works here and the other
    way round.

    Example:
        >>> from equipoise import Callback
        >>> class PrintLoss(Callback):
        ...     def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        ...         if batch_idx % 100 == 0:
        ...             trainer.print(f"step {trainer.global_step}: loss {outputs['loss']:.3f}")
    """
