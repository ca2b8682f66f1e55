"""CutHook: the rest of the hook in which a checkpoint was written."""

from typing import Any, NamedTuple

from lightning.pytorch import LightningModule

from equipoise.notices import rank_zero_warn
from equipoise.parallel.snapshot.plain.copies import copied
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.evaluation.evaluation_step import Modes, without_gradients
from equipoise.trainer.hooks.hooks import Hooks
from equipoise.trainer.logging.logs import Logs
from equipoise.trainer.loops.fit_state import FitState
from equipoise.trainer.state.run_state import RunState

__all__ = ["CutHook", "WrittenIn"]


class WrittenIn(NamedTuple):
    """The hook in which a checkpoint callback wrote a file.

    Attributes:
        hook: The name of the hook.
        key: The key of the callback.
        batch_end: The arguments of the module's `on_train_batch_end`, if that follows; None if a file cannot hold them.
    """

    hook: str
    key: str
    batch_end: list[Any] | None


class CutHook:
    """Finishes the hook in which a checkpoint callback wrote the file: other callbacks and the module come after it.

    Args:
        state: The stage.
        module: The user's module.
        strategy: The strategy.
        hooks: The hooks.
        logs: The logged values.
        fit: The state of training.
        written_in: The hook; None if no hook is to be finished.
    """

    def __init__(
        self,
        state: RunState,
        module: LightningModule,
        strategy: Strategy,
        hooks: Hooks,
        logs: Logs,
        fit: FitState,
        written_in: WrittenIn | None,
    ) -> None:
        self.state = state
        self.module = module
        self.strategy = strategy
        self.hooks = hooks
        self.logs = logs
        self.fit = fit
        self.written_in = written_in

    def finish(self, name: str, *args: Any) -> bool:
        """Finish the hook in which a checkpoint callback wrote the file, and call that of those after it.

        Args:
            name: The hook. Nothing is called if the file was written in another.
            args: Its arguments.

        Returns:
            True if the file was written in this hook.
        """
        written_in = self.written_in
        if written_in is None or written_in.hook != name:
            return False
        call = self.hooks.bind_checkpoints_after(name, written_in.key)
        if call is not None:
            call(*args)
        return True

    def finish_batch(self, index: int) -> None:
        """Run the rest of `on_train_batch_end`, if a checkpoint callback wrote the file in it.

        Args:
            index: The index of the batch in the epoch.
        """
        name = "on_train_batch_end"
        call = self.hooks.bind_module(name)
        if not self.finish(name, {}, None, index) or call is None or self.written_in is None:
            return
        arguments = self.written_in.batch_end
        if arguments is None:
            rank_zero_warn(
                f"The resumed run does not call the module's `{name}` of batch {index}, before which its checkpoint was"
                " written: a file holds no batches or outputs other than tensors, numbers, texts and plain containers"
                f" of them. Count and collect in `training_step` or `on_train_epoch_end` instead of `{name}`."
            )
        elif arguments:
            outputs, batch, batch_idx = copied(arguments, self.strategy.root_device)
            self.logs.begin_batch(batch, None, self.fit.data.open_stream.counts.of(index))
            call(outputs, batch, batch_idx)
            self.logs.end_batch()

    def finish_validation(self) -> None:
        """Call `on_validation_end` of the checkpoint callbacks after the one that wrote the file, and of the module."""
        state = self.state
        state.begin_validation()
        if self.finish("on_validation_end"):
            self._call_module_in_validation()
        state.end_validation()

    def _call_module_in_validation(self) -> None:
        """Call the module's `on_validation_end` with gradients off and in its modes of evaluation."""
        hooks = self.hooks
        call = hooks.bind_module("on_validation_end")
        if call is None:
            return
        with without_gradients(inference_mode=False), Modes(self.module) as modes:
            hooks.call_module("on_validation_model_eval")
            call()
            modes.restore(self.module)
