"""CutHook: the rest of the hook in which a checkpoint was written."""

from typing import Any, NamedTuple

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping

from equipoise.interop.lightning.classes import is_a
from equipoise.notices import rank_zero_warn
from equipoise.parallel.snapshot.plain.copies import copied
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.evaluation.evaluation_step import Modes, without_gradients
from equipoise.trainer.hooks.hooks import LIBRARIES, Hooks, state_key_of
from equipoise.trainer.logging.logs import Logs
from equipoise.trainer.loops.fit_state import FitState
from equipoise.trainer.state.run_state import RunState

__all__ = ["CutHook", "WrittenIn"]


class WrittenIn(NamedTuple):
    """The hook in which a callback wrote a file.

    Attributes:
        hook: The name of the hook.
        key: The key of the callback.
        batch_end: The arguments of `on_train_batch_end`, if that of the module or of a user's callback follows; None if
            a file cannot hold them.
    """

    hook: str
    key: str
    batch_end: list[Any] | None


class CutHook:
    """Finishes the hook in which a callback wrote the file: other callbacks and the module come after it.

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

    def finish(self, name: str, *args: Any, monitoring: bool | None = None) -> bool:
        """Finish the hook in which a callback wrote the file, and call that of those after it.

        Args:
            name: The hook. Nothing is called if the file was written in another.
            args: Its arguments.
            monitoring: Whether to call only callbacks that monitor a metric, or only others. Default: None, all.

        Returns:
            True if the file was written in this hook.
        """
        written_in = self.written_in
        if written_in is None or written_in.hook != name:
            return False
        # Callbacks of libraries that measure or show a run have seen no beginning of the hook.
        later = [each for each in self._after(written_in.key) if _monitors(each) or _is_users(each)]
        call = self.hooks.bind_of(name, [each for each in later if monitoring in (None, _monitors(each))])
        if call is not None:
            call(*args)
        return True

    def _after(self, state_key: str) -> list[Callback]:
        """Return the callbacks after the one with this `state_key`; none if it is missing."""
        callbacks = self.state.callbacks
        keys = [state_key_of(callback) for callback in callbacks]
        return callbacks[keys.index(state_key) + 1 :] if state_key in keys else []

    def finish_batch(self, index: int) -> None:
        """Run the rest of `on_train_batch_end`, if a callback wrote the file in it.

        Args:
            index: The index of the batch in the epoch.
        """
        name = "on_train_batch_end"
        written_in = self.written_in
        if written_in is None or written_in.hook != name:
            return
        if not written_in.batch_end:
            # Callbacks that monitor a metric do not read the batch, which is unknown.
            self.finish(name, {}, None, index, monitoring=True)
            if written_in.batch_end is None:
                rank_zero_warn(
                    f"The resumed run does not finish `{name}` of batch {index}, in which its checkpoint was written: a"
                    " file holds no batches or outputs other than tensors, numbers, texts and plain containers of them."
                    f" Count and collect in `training_step` or `on_train_epoch_end` instead of `{name}`."
                )
            return
        outputs, batch, _ = copied(written_in.batch_end, self.strategy.root_device)
        self.logs.begin_batch(batch, None, self.fit.data.open_stream.counts.of(index))
        self.finish(name, outputs, batch, index)
        call = self.hooks.bind_module(name)
        if call is not None:
            call(outputs, batch, index)
        self.logs.end_batch()

    def finish_epoch(self) -> None:
        """Run the rest of `on_train_epoch_end`, if a callback wrote the file in it."""
        name = "on_train_epoch_end"
        early = [state_key_of(callback) for callback in self.state.callbacks if not _monitors(callback)]
        # Those that monitor a metric come last, after the module. A writer that is gone counts as one of them.
        if self.written_in is None or self.written_in.key not in early:
            self.finish(name, monitoring=True)
        elif self.finish(name, monitoring=False):
            call = self.hooks.bind_module(name)
            if call is not None:
                call()
            self.logs.share_values()
            self.hooks.call_callbacks(name, monitoring=True)

    def finish_validation(self) -> None:
        """Call `on_validation_end` of the callbacks after the one that wrote the file, and of the module."""
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


def _monitors(callback: Callback) -> bool:
    return is_a(callback, EarlyStopping, Checkpoint)


def _is_users(callback: Callback) -> bool:
    return not type(callback).__module__.startswith(LIBRARIES)
