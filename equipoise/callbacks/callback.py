"""The callback interface: Lightning's hooks and ours, with a drawing of the loop that calls them.

Lightning's hooks, with its names, order and arguments; callbacks come before the module, and a checkpoint callback
comes last. The loop that fires them:

    setup
    on_configure_model_end                     ours: all layers exist; weights of a checkpoint come next
    on_fit_start
    (on_sanity_check_start, a few validation batches as below, on_sanity_check_end)
    on_train_start
    for each epoch:
        on_train_epoch_start
        for each batch:
            on_before_batch_to_device          ours: the batch was read
            on_train_batch_start               the batch is on its devices
                training_step
                on_before_zero_grad            first batch of an accumulation window
                on_before_backward
                on_after_backward
                on_before_optimizer_step       last batch of a window; gradients are final and unscaled
            on_train_batch_end                 gradients are still there
            if validation is due:
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

from collections.abc import Callable, Mapping, Set
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule

# At run time the class is Lightning's. Type checkers see declarations that accept either trainer.
if TYPE_CHECKING:
    from equipoise.callbacks.declared_hooks import DeclaredHooks as _LightningCallback
    from equipoise.memory.out_of_memory import OutOfMemoryEvent, Split
else:
    from lightning.pytorch import Callback as _LightningCallback

__all__ = ["Callback"]


class Callback(_LightningCallback):
    """Base class of callbacks: override the hooks you need. An unused hook costs nothing.

    Every hook receives the trainer and the module first. A callback written for Lightning works here, and one written
    for Equipoise in Lightning's Trainer, which does not call the hooks that are marked as ours.

    Attributes:
        fires_without_batch: Call `on_train_batch_end` also in a process that has no batch in a step while other
            processes have one, with `{}` for outputs and None for the batch. Needed by callbacks that exchange values
            between processes there. Default: False.
        copies_weights: Whether the callback copies the module when it is set up, and changes the copy in
            `on_train_batch_end` and other hooks. In several processes these hooks are then called in all of them; where
            the module is in shards, `setup` and the hooks of checkpoints come after it was placed. Default: False.
        uses_outputs: False if `on_train_batch_end` does not read `outputs`. If no callback reads them, they are not
            built, and the hook receives `{}`. Default: True.
        saves_memory: Whether the callback changes how steps are computed and not what they compute, and writes nothing.
            `Trainer(verify=...)` compares its steps with those without it. Default: False.
        left_out_of_checkpoints: The names of frozen weights that checkpoints leave out. A module that loads such a
            checkpoint keeps its own. Weights that are trained when a checkpoint is written are in it. The trainer sets
            the attribute without the names of weights that it loads from a checkpoint. Default: none.

    Example:
        >>> from equipoise import Callback
        >>> class PrintLoss(Callback):
        ...     def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        ...         if batch_idx % 100 == 0:
        ...             trainer.print(f"step {trainer.global_step}: loss {outputs['loss']:.3f}")
    """

    fires_without_batch: bool = False
    copies_weights: bool = False
    uses_outputs: bool = True
    saves_memory: bool = False
    left_out_of_checkpoints: Set[str] = frozenset()

    def on_configure_model_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Change the module's layers, before the weights of a checkpoint are loaded and the module is placed.

        The hook runs in every process, after the module's `configure_model`, also for evaluations. The layers may be
        changed already by an earlier run. Not called by Lightning's Trainer.

        Args:
            trainer: The trainer.
            pl_module: The user's module.
        """

    def on_before_batch_to_device(self, trainer: Any, pl_module: LightningModule, batch_idx: int) -> None:
        """Run after a training batch was read, before it is copied to its devices. Not called by Lightning's Trainer.

        Args:
            trainer: The trainer.
            pl_module: The user's module.
            batch_idx: Index of the batch.
        """

    def wrap_call(self, trainer: Any, action: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Put a function in the place of one that the loop calls. Not called by Lightning's Trainer.

        The hook runs a few times in an epoch, never in a step: when the loop binds its calls. The callback's class must
        derive from this one.

        Args:
            trainer: The trainer.
            action: The name of the call in a profile, such as `[Callback]NAME.HOOK`. Names that profiles lack are
                `[Strategy]NAME.forward_backward`, `collect_gradients` and `finish_gradients`, `validation` and
                `log_metrics`.
            function: The function that the loop would call.

        Returns:
            A function with the same arguments and result; `function` itself if nothing is to be changed.
        """
        return function

    def progress_values(self) -> Mapping[str, Any]:
        """Return values for `ProgressBar`, by name, when it is redrawn; they are shown after the logged ones."""
        return {}

    def on_out_of_memory(
        self, trainer: Any, pl_module: LightningModule, event: "OutOfMemoryEvent"
    ) -> "int | Split | None":
        """Decide what happens with a batch that ran out of memory. Not called by Lightning's Trainer.

        The hook runs in the process of the error, before anything is done about it. While a callback overrides it, the
        trainer saves the state before each step, so that the step can be repeated.

        Args:
            trainer: The trainer.
            pl_module: The user's module.
            event: The error: device, phase, batch, sizes.

        Returns:
            The number of micro-batches in which the batch is computed, as a number or a `Split`; 0 to leave it out;
            None to raise the error. The first callback that does not return None decides. After an error in the
            optimiser's step, any number but 0 repeats that step. If `event.can_repeat` is False, the error is always
            raised.
        """
        return None
