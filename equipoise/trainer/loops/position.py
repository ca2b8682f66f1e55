"""Position of a training run: what a checkpoint needs beside the counters, to continue exactly where it was written.

Lightning's counters tell in which hook a checkpoint was written. The rest stands under the key "equipoise": the state
of every generator, now and when the epoch began; the gradients of an unfinished accumulation window; and the values
that the epoch has logged so far.
"""

from copy import deepcopy
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule

from equipoise.interop.metrics import load_metric_states, metric_states
from equipoise.interop.module_metrics import named_metrics
from equipoise.parallel.batches.sampling import NO_BATCH
from equipoise.parallel.snapshot.plain.copies import copied
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.checkpointing.file import OUR_KEY
from equipoise.trainer.checkpointing.objects import is_plain
from equipoise.trainer.data.batch_stream import NOTHING, BatchStream
from equipoise.trainer.data.loader_state import load_random_state, random_state_of
from equipoise.trainer.hooks.hooks import Hooks
from equipoise.trainer.logging.logs import Logs
from equipoise.trainer.loops.fit_state import FitState
from equipoise.trainer.state.run_state import RunState

if TYPE_CHECKING:
    from equipoise.trainer.evaluation.evaluation_loop import EvaluationLoop

__all__ = ["PositionOfRun"]


class PositionOfRun:
    """The position of a training run, collected when a checkpoint is written or an epoch is left, and restored.

    Args:
        state: Contains the optimisers and the requests to stop.
        module: The user's module.
        strategy: The strategy.
        hooks: The hooks.
        logs: The logged values.
        fit: The state of training.
        val_loop: The loop that validates inside the fit.
    """

    def __init__(
        self,
        state: RunState,
        module: LightningModule,
        strategy: Strategy,
        hooks: Hooks,
        logs: Logs,
        fit: FitState,
        val_loop: "EvaluationLoop",
    ) -> None:
        self._state = state
        self._module = module
        self._strategy = strategy
        self._hooks = hooks
        self._logs = logs
        self._fit = fit
        self._val_loop = val_loop

    def now(self) -> dict[str, Any]:
        """Return what a checkpoint needs, beside the counters, to continue exactly."""
        fit = self._fit
        assert fit.hook_state is not None
        module = self._module
        data = fit.data
        names = {id(metric): name for name, metric in named_metrics(module).items()}
        # What the validation has logged may be metrics of the module.
        logged = self._val_loop.collection
        validated = {names.get(id(entry.metric)) for entry in logged.entries.values()} - {None}
        portable = self._strategy.portable
        return {
            "random_state": random_state_of(data.flat),
            "epoch_random_state": data.epoch_random_state,
            "order_drawn": data.stream is not None,
            "skipped_steps": fit.progress.skipped_steps,
            "ahead": _storable_ahead(data.stream),
            "restarts": [] if data.stream is None else data.stream.restarts.state_dict(),
            "batch_end": _storable_batch_end(self._hooks.awaited),
            "window": fit.window.state_dict(),
            # Those of an unfinished window, in the order of the optimisers' parameters.
            "gradients": portable.gradients(self._state.optimizers, window_is_open=fit.window.is_open),
            "logs": self._logs.state_dict(fit.collection, names),
            "metrics": metric_states(module),
            "hook_state": fit.hook_state.changes(),
            "data_before_order": fit.hook_state.before_order,
            "before_request": fit.hook_state.before_request,
            "metrics_of_validation": sorted(fit.validated_metrics.union(validated)),
            "validated": sorted(fit.validated | logged.names()),
            "before_validation": fit.before_validation,
            "loaders": {"loaded_at": data.loaded_at, "workers": data.workers_before_pass()},
            "val_loaders": self._val_loop.loaders_state(),
            "stopped_by": sorted(self._state.stop_requests - {""}),
            "has_ended": fit.has_ended,
            "has_ended_early": fit.has_ended_early,
            "has_validated_in_epoch": fit.has_validated_in_epoch,
        }

    def at_left_epoch(self) -> dict[str, Any]:
        """Return what a run with higher limits needs to continue an epoch that this run leaves before its end.

        It is called after the last batch, and before the hooks of the epoch's end.
        """
        position = self.now()
        position["batch_is_done"] = True
        # These continue changing.
        for name in ("logs", "gradients"):
            position[name] = deepcopy(position[name])
        positions = self._strategy.processes.data.gather_objects(position)
        return {"loop": self._fit.state_dict(), "positions": positions}

    def before_validation(self) -> dict[str, Any]:
        """Return the state that a validation changes, so that one which was killed can begin anew."""
        assert self._fit.hook_state is not None
        return {
            "random_state": random_state_of(self._fit.data.flat),
            "metrics": metric_states(self._module),
            "hook_state": self._fit.hook_state.changes(),
            "val_loaders": self._val_loop.loaders_state(),
        }

    # Of a checkpoint.

    def load_logs(self, position: dict[str, Any]) -> None:
        """Restore the values that the epoch had logged, and the states of the metrics."""
        from equipoise.trainer.checkpointing.entry_checks import loading

        with loading(OUR_KEY):
            self._logs.load_state_dict(position["logs"], self._fit.collection, named_metrics(self._module))
        load_metric_states(self._module, position["metrics"])

    def load_gradients(self, position: dict[str, Any]) -> None:
        """Restore the gradients of an unfinished accumulation window; there are none between two windows."""
        self._strategy.portable.load_gradients(self._state.optimizers, position["gradients"])

    def load_before_validation(self, position: dict[str, Any]) -> None:
        """Restore the state before a validation that was killed, which begins anew."""
        before = position["before_validation"]
        if before:
            assert self._fit.hook_state is not None
            load_random_state(self._fit.data.flat, before["random_state"])
            load_metric_states(self._module, before["metrics"])
            self._fit.hook_state.restore(before.get("hook_state", {}))

    def load_after_validation(self, position: dict[str, Any]) -> None:
        """Reset the metrics that a validation has logged. Training continues with those that it logs, too."""
        metrics = named_metrics(self._module)
        trained = {id(entry.metric) for entry in self._fit.collection.entries.values()}
        before = position["before_validation"].get("metrics", {})
        states = {}
        for name in position["metrics_of_validation"]:
            if name in metrics:
                metrics[name].reset()
                if id(metrics[name]) in trained and name in before:
                    states[name] = before[name]
        load_metric_states(self._module, states)


def _storable_ahead(stream: BatchStream | None) -> list[Any]:
    """Return the batch that was read ahead, if a file can hold it: it cannot be read again as it was."""
    if stream is None or stream.ahead is NOTHING or stream.ahead is NO_BATCH or not is_plain(stream.ahead):
        return []
    return [stream.ahead]


def _storable_batch_end(awaited: tuple[Any, ...]) -> list[Any] | None:
    """Return the arguments of `on_train_batch_end` for those that follow; None if no file can hold them."""
    arguments = list(awaited)
    return copied(arguments) if is_plain(arguments) else None
