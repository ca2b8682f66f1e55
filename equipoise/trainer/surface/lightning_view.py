"""Attributes of Lightning's Trainer that its own objects read.

`LightningModule.log`, ModelCheckpoint, progress bars and others read attributes of Lightning's Trainer, some with
private names. These classes offer them, made of what our trainer has; nothing of ours uses them.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision

from equipoise.interop.lightning.self_log import LogOptions
from equipoise.trainer.data.source_view import SourceView
from equipoise.trainer.hooks.hooks import overrides

if TYPE_CHECKING:
    from equipoise.trainer.evaluation.evaluation_loop import EvaluationLoop
    from equipoise.trainer.trainer import Trainer

__all__ = ["LightningNames", "precision_plugin"]


def precision_plugin(name: str, device_type: str, scaler: Any, clip: Callable[..., None]) -> Precision:
    """The plugin of Lightning that stands for one of our precisions: it is asked for its dtype, and to clip.

    Args:
        name: The precision's name.
        device_type: "cpu", "cuda", ...
        scaler: The loss scaler, if there is one.
        clip: Clips gradients, called with optimiser, value and algorithm.
    """
    plugin: Precision
    if name.endswith("-mixed"):
        plugin = MixedPrecision("16-mixed" if name == "16-mixed" else "bf16-mixed", device_type, scaler)
    elif name == "64-true":
        plugin = DoublePrecision()
    elif name == "32-true":
        plugin = Precision()
    else:
        plugin = HalfPrecision("bf16-true" if name == "bf16-true" else "16-true")
    plugin.clip_gradients = clip  # type: ignore[method-assign]
    return plugin


class _Results:
    """`trainer._results`: where the stock `LightningModule.log` puts a value, for modules that override `log`."""

    def __init__(self, trainer: "Trainer") -> None:
        self._trainer = trainer

    def log(self, hook: str, name: str, value: Any, **given: Any) -> None:
        options = LogOptions(**{key: value for key, value in given.items() if key in LogOptions._fields})
        self._trainer.logs.add(hook, name, value, tuple(options), given.get("batch_size"))

    def reset(self, *args: Any, **kwargs: Any) -> None: ...


class _LoggerConnector:
    """`trainer._logger_connector`."""

    def __init__(self, trainer: "Trainer") -> None:
        self._trainer, self._current_fx = trainer, None

    @property
    def should_update_logs(self) -> bool:
        trainer = self._trainer
        if trainer.log_every_n_steps == 0:
            return False
        if trainer.training:
            step = trainer.progress.batches_that_stepped + 1
        elif (loop := trainer.active_evaluation) is not None:
            step = loop.progress.current.ready
        else:
            return True
        return step % trainer.log_every_n_steps == 0 or bool(trainer.should_stop)

    def should_reset_tensors(self, hook: str) -> bool:
        return False

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self._trainer.log_metrics(metrics, step=step)


class _DataConnector:
    """`trainer._data_connector`, which finds out whose transfer hook is meant; it is its own selector."""

    def __init__(self, trainer: "Trainer") -> None:
        self._trainer = trainer

    @property
    def _datahook_selector(self) -> "_DataConnector":
        return self

    def get_instance(self, hook: str) -> Any:
        datamodule = self._trainer.datamodule
        overridden = datamodule is not None and overrides(datamodule, hook, LightningDataModule)
        return datamodule if overridden else self._trainer.lightning_module


class _AcceleratorConnector:
    """`trainer._accelerator_connector`."""

    def __init__(self, trainer: "Trainer") -> None:
        self._trainer = trainer

    @property
    def is_distributed(self) -> bool:
        return self._trainer.world_size > 1


class _EvaluationView:
    """`trainer.validate_loop`, `trainer.test_loop`, and the validation inside a fit."""

    def __init__(self, trainer: "Trainer", loop: "EvaluationLoop") -> None:
        self._trainer = trainer
        self._loop = loop

    @property
    def _has_run(self) -> bool:
        return self._loop.has_run

    @property
    def batch_progress(self) -> Any:
        return self._loop.progress

    @property
    def max_batches(self) -> list[float]:
        return self._loop.max_batches

    @property
    def _data_source(self) -> SourceView:
        return self._trainer.source_of(self._loop.stage)


class _EpochLoopView:
    """`trainer.fit_loop.epoch_loop`."""

    def __init__(self, trainer: "Trainer") -> None:
        self._trainer = trainer

    @property
    def batch_progress(self) -> Any:
        return self._trainer.progress.batch

    @property
    def _batches_that_stepped(self) -> int:
        return self._trainer.progress.batches_that_stepped

    @property
    def val_loop(self) -> _EvaluationView:
        return _EvaluationView(self._trainer, self._trainer.fit_loop_state.val_loop)

    @property
    def global_step(self) -> int:
        return self._trainer.global_step

    @property
    def batch_idx(self) -> int:
        return self._trainer.progress.batch.current.ready - 1

    @property
    def total_batch_idx(self) -> int:
        return self._trainer.progress.batch.total.ready - 1

    def _should_check_val_epoch(self) -> bool:
        context = self._trainer.current_context
        return context is not None and context.validates_in_epoch


class FitLoopView:
    """`trainer.fit_loop`, which some callbacks also write to."""

    def __init__(self, trainer: "Trainer") -> None:
        self._trainer = trainer
        self.epoch_loop = _EpochLoopView(trainer)

    @property
    def max_epochs(self) -> int | None:
        return self._trainer.max_epochs

    @max_epochs.setter
    def max_epochs(self, value: int | None) -> None:
        self._trainer.max_epochs = value

    @property
    def min_epochs(self) -> int | None:
        return self._trainer.min_epochs

    @property
    def max_steps(self) -> int:
        return self._trainer.max_steps

    @property
    def min_steps(self) -> int | None:
        return self._trainer.min_steps

    @property
    def max_batches(self) -> float:
        return self._trainer.fit_loop_state.fit.data.max_batches

    @max_batches.setter
    def max_batches(self, value: float) -> None:
        self._trainer.fit_loop_state.fit.data.max_batches = value

    @property
    def _skip_backward(self) -> bool:
        return self._trainer.fit_loop_state.fit.skip_backward

    @_skip_backward.setter
    def _skip_backward(self, value: bool) -> None:
        self._trainer.fit_loop_state.fit.skip_backward = value

    @property
    def epoch_progress(self) -> Any:
        return self._trainer.progress.epoch

    @property
    def _data_source(self) -> SourceView:
        return self._trainer.source_of("train")

    @property
    def batch_idx(self) -> int:
        return self.epoch_loop.batch_idx

    @property
    def total_batch_idx(self) -> int:
        return self.epoch_loop.total_batch_idx

    def _should_accumulate(self) -> bool:
        trainer = self._trainer
        ready = trainer.progress.batch.current.ready
        return ready % trainer.accumulate_grad_batches != 0 and not trainer.fit_loop_state.fit.batches_done()

    def state_dict(self) -> dict[str, Any]:
        return self._trainer.progress.state_dict()


class LightningNames:
    """The names under which Lightning's objects look for all this; the Trainer inherits them."""

    def __init__(self) -> None:
        trainer: Any = self
        self.fit_loop = FitLoopView(trainer)
        self._logger_connector = _LoggerConnector(trainer)
        self._data_connector = _DataConnector(trainer)
        self._accelerator_connector = _AcceleratorConnector(trainer)
        self.__results = _Results(trainer)

    def source_of(self: Any, stage: str) -> SourceView:
        """Return the origin of a stage's loaders, in the form in which Lightning's objects ask for it.

        Args:
            stage: "train", "val", "test" or "predict".
        """
        context = self.current_context
        return SourceView(None if context is None else context.sources[stage])

    @property
    def _results(self: Any) -> _Results | None:
        return self._LightningNames__results if self.logs.collection is not None else None

    @property
    def validate_loop(self: Any) -> _EvaluationView:
        """The loop that `validate` runs."""
        return _EvaluationView(self, self.evaluations["validate"])

    @property
    def test_loop(self: Any) -> _EvaluationView:
        """The loop that `test` runs."""
        return _EvaluationView(self, self.evaluations["test"])

    @property
    def _evaluation_loop(self: Any) -> _EvaluationView:
        return _EvaluationView(self, self.active_evaluation or self.fit_loop_state.val_loop)

    @property
    def _val_check_time_interval(self: Any) -> float | None:
        return self.val_check_seconds  # type: ignore[no-any-return]
