"""Attributes of Lightning's Trainer that its own objects read.

`LightningModule.log`, ModelCheckpoint, progress bars and others read attributes of Lightning's Trainer, some with
private names. These classes offer them from the state of our trainer; our own code does not use them.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision

from equipoise.interop.lightning.self_log import LogOptions
from equipoise.trainer.data.loaders import Source
from equipoise.trainer.hooks.hooks import overrides
from equipoise.trainer.surface.state_fields import Reads, StateField

if TYPE_CHECKING:
    from equipoise.trainer.surface.parts import TrainerParts

__all__ = ["LightningNames", "precision_plugin"]


def precision_plugin(name: str, device_type: str, scaler: Any, clip: Callable[..., None]) -> Precision:
    """Return the plugin of Lightning for one of our precisions; users read its dtype, and modules clip by it."""
    plugin: Precision
    if name.endswith("-mixed"):
        plugin = MixedPrecision("16-mixed" if name == "16-mixed" else "bf16-mixed", device_type, scaler)
    elif name == "64-true":
        plugin = DoublePrecision()
    elif name == "32-true":
        plugin = Precision()
    else:
        # Any other precision in half, such as 16-true-norm32.
        plugin = HalfPrecision("bf16-true" if name == "bf16-true" else "16-true")
    plugin.clip_gradients = clip  # type: ignore[method-assign]
    return plugin


class _Results:
    """`trainer._results`: receives values from the `log` of Lightning's module, where a module overrides `log`."""

    def __init__(self, parts: "TrainerParts") -> None:
        self._parts = parts

    def log(self, hook: str, name: str, value: Any, **arguments: Any) -> None:
        # The module passes more arguments than ours reads, and some of them under the same names.
        known = {key: argument for key, argument in arguments.items() if key in LogOptions._fields}
        self._parts.logs.add(hook, name, value, tuple(LogOptions(**known)), arguments.get("batch_size"))

    def reset(self, *args: Any, **kwargs: Any) -> None: ...


class _Connectors:
    """`trainer._logger_connector`, `trainer._data_connector` and `trainer._accelerator_connector`."""

    def __init__(self, parts: "TrainerParts") -> None:
        self._parts = parts
        # `LightningModule.log` writes it, and nothing of ours reads it.
        self._current_fx = None

    # Of values.

    # Read by LearningRateMonitor, DeviceStatsMonitor and ThroughputMonitor.
    @property
    def should_update_logs(self) -> bool:
        state = self._parts.state
        if state.log_every_n_steps == 0:
            return False
        if state.training:
            step = state.progress.batches_that_stepped + 1
        else:
            loop = self._parts.active_evaluation
            if loop is None:
                return True
            step = loop.progress.current.ready
        return step % state.log_every_n_steps == 0 or state.should_stop

    # Called by `LightningModule.log`; our entries begin anew by themselves.
    def should_reset_tensors(self, hook: str) -> bool:
        return False

    # Called by ThroughputMonitor.
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self._parts.logger_output.log_metrics(metrics, step=step)

    # Of data.

    @property
    def _datahook_selector(self) -> "_Connectors":
        return self

    # Called by `LightningModule` for each transfer hook, to find its owner.
    def get_instance(self, hook: str) -> Any:
        datamodule = self._parts.state.datamodule
        if datamodule is not None and overrides(datamodule, hook, LightningDataModule):
            return datamodule
        return self._parts.module

    # Of processes.

    # Read by `LightningModule.log`.
    @property
    def is_distributed(self) -> bool:
        return self._parts.strategy.processes.world_size > 1


class _EvaluationView:
    """`trainer.validate_loop`, `trainer.test_loop`, and the validation inside a fit."""

    def __init__(self, loop: Any, parts: "TrainerParts") -> None:
        self._loop = loop
        self._parts = parts

    # Read by ModelCheckpoint.
    _has_run = Reads[bool]("_loop.has_run")
    batch_progress = Reads[Any]("_loop.progress")
    max_batches = Reads[Any]("_loop.max_batches")

    @property
    def _data_source(self) -> Source:
        return self._parts.source_of(self._loop.stage)


class _EpochLoopView:
    """`trainer.fit_loop.epoch_loop`."""

    def __init__(self, parts: "TrainerParts") -> None:
        self._parts = parts

    batch_progress = Reads[Any]("_parts.state.progress.batch")

    # Read by LearningRateMonitor and DeviceStatsMonitor.
    _batches_that_stepped = Reads[int]("_parts.state.progress.batches_that_stepped")

    @property
    def val_loop(self) -> _EvaluationView:
        return _EvaluationView(self._parts.fit_loop.val_loop, self._parts)

    global_step = Reads[int]("_parts.global_step")

    @property
    def batch_idx(self) -> int:
        return self._parts.state.progress.batch.current.ready - 1

    @property
    def total_batch_idx(self) -> int:
        return self._parts.state.progress.batch.total.ready - 1

    # Called by progress bars.
    def _should_check_val_epoch(self) -> bool:
        fit_loop = self._parts.fit_loop
        return fit_loop.has_begun and fit_loop.validates_in_epoch


class FitLoopView:
    """`trainer.fit_loop`, which some callbacks also write to."""

    def __init__(self, parts: "TrainerParts") -> None:
        self._parts = parts
        self.run_state = parts.state
        self.epoch_loop = _EpochLoopView(parts)

    # Limits; StochasticWeightAveraging writes `max_epochs`.
    max_epochs = StateField[int | None]()
    min_epochs = StateField[int | None]()
    max_steps = StateField[int]()
    min_steps = StateField[int | None]()

    @property
    def max_batches(self) -> float:
        return self._parts.fit_loop.fit.data.max_batches

    @max_batches.setter
    def max_batches(self, value: float) -> None:
        self._parts.fit_loop.fit.data.set_max_batches(value)

    # StochasticWeightAveraging writes this and `max_batches`, for an epoch that updates batch statistics alone.
    @property
    def _skip_backward(self) -> bool:
        return self._parts.fit_loop.fit.skip_backward

    @_skip_backward.setter
    def _skip_backward(self, value: bool) -> None:
        self._parts.fit_loop.fit.skip_backward = value

    epoch_progress = Reads[Any]("_parts.state.progress.epoch")

    @property
    def restarting(self) -> bool:
        """True if a resumed run is completing the epoch of its checkpoint."""
        return self._parts.fit_loop.resumption is not None

    @property
    def _data_source(self) -> Source:
        return self._parts.source_of("train")

    batch_idx = Reads[int]("epoch_loop.batch_idx")
    total_batch_idx = Reads[int]("epoch_loop.total_batch_idx")

    # Called by ThroughputMonitor.
    def _should_accumulate(self) -> bool:
        state = self._parts.state
        if self._parts.fit_loop.fit.batches_done():
            return False
        return state.progress.batch.current.ready % state.accumulate_grad_batches != 0

    def state_dict(self) -> dict[str, Any]:
        return self._parts.state.progress.state_dict()


class LightningNames:
    """The names under which Lightning's objects look for all this; the Trainer inherits them."""

    def __init__(self, parts: "TrainerParts") -> None:
        self.parts = parts
        self.fit_loop = FitLoopView(parts)
        self._logger_connector = _Connectors(parts)
        self._data_connector = self._logger_connector
        self._accelerator_connector = self._logger_connector
        self.__results = _Results(parts)

    # None outside of a loop: `LightningModule.log` raises an error that says so.
    @property
    def _results(self) -> _Results | None:
        if self.parts.logs.collection is None:
            return None
        return self.__results

    @property
    def validate_loop(self) -> _EvaluationView:
        """The loop that `validate` runs."""
        return _EvaluationView(self.parts.evaluations["validate"], self.parts)

    @property
    def test_loop(self) -> _EvaluationView:
        """The loop that `test` runs."""
        return _EvaluationView(self.parts.evaluations["test"], self.parts)

    # Read by ThroughputMonitor.
    @property
    def _evaluation_loop(self) -> _EvaluationView:
        loop = self.parts.active_evaluation or self.parts.fit_loop.val_loop
        return _EvaluationView(loop, self.parts)

    # Read by ModelCheckpoint.
    _val_check_time_interval = Reads[float | None]("parts.state.val_check_seconds")
