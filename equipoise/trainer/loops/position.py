"""Position of a training run: what a checkpoint needs beside the counters, to continue exactly where it was written.

Lightning's counters tell in which hook a checkpoint was written. The rest stands under the key "equipoise": the state
of every generator, now and when the epoch began; the gradients of an unfinished accumulation window; and the values
that the epoch has logged so far.
"""

from copy import deepcopy
from typing import TYPE_CHECKING, Any

from torch import nn

from equipoise.interop.metrics import metric_states
from equipoise.interop.module_metrics import named_metrics
from equipoise.parallel.batches.sampling import NO_BATCH
from equipoise.parallel.snapshot.plain.copies import copied
from equipoise.trainer.checkpointing.file import is_plain
from equipoise.trainer.data.batch_stream import NOTHING, BatchStream
from equipoise.trainer.data.loader_state import random_state_of
from equipoise.trainer.loops.fit_state import FitState

if TYPE_CHECKING:
    from equipoise.trainer.evaluation.evaluation_loop import EvaluationLoop
    from equipoise.trainer.runtime.run_context import RunContext

__all__ = ["before_validation", "leave_epoch", "position_of"]


def position_of(context: "RunContext", fit: FitState, val_loop: "EvaluationLoop") -> dict[str, Any]:
    """Return what a checkpoint needs, beside the counters, to continue exactly."""
    assert fit.hook_state is not None
    module = context.module
    data = fit.data
    names = {id(metric): name for name, metric in named_metrics(module).items()}
    # What the validation has logged may be metrics of the module.
    validated = {names.get(id(entry.metric)) for entry in val_loop.collection.entries.values()} - {None}
    return {
        "random_state": random_state_of(data.flat),
        "epoch_random_state": data.epoch_random_state,
        "order_drawn": data.stream is not None,
        "skipped_steps": fit.progress.skipped_steps,
        "ahead": _storable_ahead(data.stream),
        "batch_end": _storable_batch_end(context),
        "window": fit.window.state_dict(),
        # Those of an unfinished window, in the order of the optimisers' parameters.
        "gradients": context.strategy.portable.gradients(context.state.optimizers, window_is_open=fit.window.is_open),
        "logs": context.logs.state_dict(fit.collection, names),
        "metrics": metric_states(module),
        "hook_state": fit.hook_state.changes(),
        "data_before_order": fit.hook_state.before_order,
        "metrics_of_validation": sorted(fit.validated_metrics.union(validated)),
        "validated": sorted(fit.validated | val_loop.collection.names()),
        "before_validation": fit.before_validation,
        "loaders": {"loaded_at": data.loaded_at, "workers": data.workers_before_pass()},
        "val_loaders": val_loop.loaders_state(),
        "stopped_by": sorted(context.state.stop_requests - {""}),
        "has_ended": fit.has_ended,
        "has_ended_early": fit.has_ended_early,
        "has_validated_in_epoch": fit.has_validated_in_epoch,
    }


def _storable_ahead(stream: BatchStream | None) -> list[Any]:
    """Return the batch that was read ahead, if a file can hold it: it cannot be read again as it was."""
    if stream is None or stream.ahead is NOTHING or stream.ahead is NO_BATCH or not is_plain(stream.ahead):
        return []
    return [stream.ahead]


def _storable_batch_end(context: "RunContext") -> list[Any] | None:
    """Return the arguments of the module's `on_train_batch_end`, if that follows; None if no file can hold them."""
    arguments = list(context.hooks.awaited)
    return copied(arguments) if is_plain(arguments) else None


def leave_epoch(context: "RunContext", fit: FitState, val_loop: "EvaluationLoop") -> dict[str, Any]:
    """Return what a run with higher limits needs to continue an epoch that this run leaves before its end.

    It is called after the last batch, and before the hooks of the epoch's end.
    """
    position = position_of(context, fit, val_loop)
    position["batch_is_done"] = True
    # These continue changing.
    for name in ("logs", "gradients"):
        position[name] = deepcopy(position[name])
    return {"loop": fit.state_dict(), "positions": context.strategy.processes.data.gather_objects(position)}


def before_validation(module: nn.Module, fit: FitState, val_loop: "EvaluationLoop") -> dict[str, Any]:
    """Return the state that a validation changes, so that one which was killed can begin anew."""
    assert fit.hook_state is not None
    return {
        "random_state": random_state_of(fit.data.flat),
        "metrics": metric_states(module),
        "hook_state": fit.hook_state.changes(),
        "val_loaders": val_loop.loaders_state(),
    }
