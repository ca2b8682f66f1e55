"""Public attributes of the Trainer, under Lightning's names."""

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from lightning.pytorch.callbacks import ProgressBar as LightningProgressBar
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.plugins.precision import Precision as LightningPrecision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.enums import GradClipAlgorithmType
from torch import Tensor
from torch.optim import Optimizer

from equipoise.interop.lightning.classes import is_a
from equipoise.precision import Precision
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.evaluation.evaluation_loop import EvaluationLoop
from equipoise.trainer.evaluation.prediction_loop import PredictionLoop
from equipoise.trainer.logging.logger_output import LoggerOutput
from equipoise.trainer.logging.logs import Logs
from equipoise.trainer.logging.results_table import to_scalars
from equipoise.trainer.loops.fit_loop import FitLoop
from equipoise.trainer.runtime.run_context import RunContext
from equipoise.trainer.settings.devices import accelerator_of
from equipoise.trainer.state.run_state import RunState
from equipoise.trainer.surface.lightning_view import LightningNames, precision_plugin
from equipoise.trainer.surface.state_fields import StateFields
from equipoise.trainer.surface.strategy_view import StrategyView
from equipoise.trainer.surface.wrapped_optimizers import WrappedOptimizers

if TYPE_CHECKING:
    from equipoise.trainer.trainer import Trainer

__all__ = ["PublicState"]


class PublicState(StateFields, LightningNames):
    """The public attributes of a trainer.

    Attributes:
        run_state: The state that the parts of a run share.
        datamodule: The user's data module, if there is one.
    """

    def __init__(self, strategy: Strategy, precision: Precision, root_dir: str) -> None:
        super().__init__()
        trainer: Trainer = self  # type: ignore[assignment]
        self.run_state = RunState(root_dir=root_dir)
        self.connected_strategy = strategy
        self.precision_in_use = precision
        self.datamodule: LightningDataModule | None = None
        self.logs = Logs()
        self.logger_output = LoggerOutput(self.run_state, self.logs, self)
        self.fit_loop_state = FitLoop(self.run_state, EvaluationLoop(self.run_state, "val", fitting=True))
        self.evaluations = {
            "validate": EvaluationLoop(self.run_state, "val"),
            "test": EvaluationLoop(self.run_state, "test"),
        }
        self.predict_loop = PredictionLoop(self.run_state)
        self._context: RunContext | None = None
        self._view = StrategyView(strategy, trainer)
        self.wrapped_optimizers = WrappedOptimizers(self.run_state, self._view)
        device = strategy.root_device.type
        self.precision_plugin: LightningPrecision = precision_plugin(
            precision.name, device, precision.scaler, self._clip
        )
        self.accelerator: Accelerator = accelerator_of(strategy.root_device)

    # Runs.

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but the present run, on its way to another process."""
        return {**vars(self), "_context": None}

    def begin_run(self, context: RunContext) -> None:
        """Takes the parts of a new run; loaders of earlier ones are forgotten."""
        self._context = context
        self.fit_loop_state.begin_run(context)
        self.predict_loop.begin_run(context.sources["predict"])
        for loop in (self.fit_loop_state.val_loop, *self.evaluations.values()):
            loop.forget_data()

    @property
    def current_context(self) -> RunContext | None:
        """The parts of this run or the last one."""
        return self._context

    @property
    def lightning_module(self) -> LightningModule | None:
        """The user's module, of this run or the last one."""
        return self._context.module if self._context is not None else None

    @property
    def model(self) -> LightningModule | None:
        """The user's module."""
        return self.lightning_module

    # Where it runs.

    @property
    def strategy(self) -> Any:
        """The strategy, and what Lightning's objects ask of one."""
        return self._view

    @property
    def global_rank(self) -> int:
        """The number of this process among all."""
        return self.connected_strategy.processes.rank

    @property
    def local_rank(self) -> int:
        """The number of this process on its machine."""
        return self.connected_strategy.processes.local_rank

    @property
    def node_rank(self) -> int:
        """The number of this machine."""
        return self.connected_strategy.processes.node_rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.connected_strategy.processes.world_size

    @property
    def is_global_zero(self) -> bool:
        """True in the process that writes files and reports to the user."""
        return self.connected_strategy.processes.is_main

    @property
    def device_ids(self) -> list[int]:
        """The indices of the devices of this process."""
        return [device.index or 0 for device in self.connected_strategy.devices]

    @property
    def num_devices(self) -> int:
        """The number of devices on this machine."""
        strategy = self.connected_strategy
        return max(len(strategy.devices), strategy.processes.world_size // int(getattr(self, "num_nodes", 1)))

    @property
    def precision(self) -> str:
        """The name of the precision."""
        return self.precision_in_use.name

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler of 16-mixed."""
        return self.precision_in_use.scaler

    # Counters.

    @property
    def global_step(self) -> int:
        """The number of optimiser steps done, over all optimisers; it is not reset."""
        if self._context is None:
            return self.progress.optimizer_step.completed
        return self._context.global_step

    @property
    def is_last_batch(self) -> bool:
        """True if the present training batch is the last of the epoch."""
        return self.progress.batch.is_last_batch

    @property
    def num_training_batches(self) -> float:
        """Training batches per epoch; infinite if unknown."""
        return self.fit_loop_state.fit.data.max_batches

    @property
    def val_check_batch(self) -> float | None:
        """Validation follows every so many training batches; infinite: at the epoch's end; None: by the clock."""
        return self.fit_loop_state.fit.val_check_batch

    @property
    def num_val_batches(self) -> list[float]:
        """Validation batches of each loader."""
        loop = self.evaluations["validate"] if self.state.fn == TrainerFn.VALIDATING else self.fit_loop_state.val_loop
        return loop.num_batches

    @property
    def num_sanity_val_batches(self) -> list[float]:
        """Validation batches of each loader before training."""
        return [min(self.num_sanity_val_steps, batches) for batches in self.fit_loop_state.val_loop.num_batches]

    @property
    def num_test_batches(self) -> list[float]:
        """Test batches of each loader."""
        return self.evaluations["test"].num_batches

    @property
    def num_predict_batches(self) -> list[float]:
        """Prediction batches of each loader."""
        return self.predict_loop.max_batches

    # Data.

    @property
    def enable_validation(self) -> bool:
        """True if a fit validates: there is a loader, a `validation_step`, and no limit of 0."""
        return self._context is not None and self._context.enable_validation

    @property
    def train_dataloader(self) -> Any:
        """The training loaders in use."""
        loaders = self.fit_loop_state.fit.data.loaders
        return loaders.iterables if loaders is not None else None

    @property
    def val_dataloaders(self) -> Any:
        """The validation loaders in use."""
        loaders = self.fit_loop_state.val_loop.loaders or self.evaluations["validate"].loaders
        return loaders.iterables if loaders is not None else None

    @property
    def test_dataloaders(self) -> Any:
        """The test loaders in use."""
        loaders = self.evaluations["test"].loaders
        return loaders.iterables if loaders is not None else None

    @property
    def predict_dataloaders(self) -> Any:
        """The prediction loaders in use."""
        loaders = self.predict_loop.loaders
        return loaders.iterables if loaders is not None else None

    @property
    def active_evaluation(self) -> Any:
        """The evaluation or prediction loop that runs, if one does."""
        if self.predicting:
            return self.predict_loop
        if not self.evaluating and not self.sanity_checking:
            return None
        if self.state.fn is None or self.state.fn == TrainerFn.FITTING:
            return self.fit_loop_state.val_loop
        return self.evaluations[self.state.fn.value]

    # Values.

    @property
    def callback_metrics(self) -> dict[str, Any]:
        """Logged values, as callbacks see them."""
        return self.logs.callback_metrics

    @property
    def logged_metrics(self) -> dict[str, Any]:
        """Logged values for the loggers."""
        return self.logs.logged_metrics

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """Logged values for the progress bar, read from the devices."""
        return to_scalars(self.logs.progress_bar_metrics)

    @property
    def progress_bar_values(self) -> dict[str, Tensor]:
        """The same, not read from the devices: for a progress bar that never waits for one."""
        return self.logs.progress_bar_metrics

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Hand values to the loggers; see `LoggerOutput.log_metrics`."""
        self.logger_output.log_metrics(metrics, step)

    def hand_over_last_step(self) -> None:
        """Hand the values of the last training step to listeners; see `LoggerOutput.hand_over_last_step`."""
        self.logger_output.hand_over_last_step()

    # Files.

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return self.loggers[0] if self.loggers else None

    @logger.setter
    def logger(self, logger: Logger | None) -> None:
        self.loggers = [logger] if logger else []

    @property
    def log_dir(self) -> str | None:
        """The folder of the run: that of the first logger, else `default_root_dir`; the same in every process."""
        logger = self.logger
        if logger is None:
            folder: str | None = self.default_root_dir
        else:
            folder = logger.log_dir if is_a(logger, TensorBoardLogger, CSVLogger) else logger.save_dir
        return self.connected_strategy.processes.broadcast(folder)

    @property
    def ckpt_path(self) -> Any:
        """The checkpoint that was loaded; set it to load one in the runs that follow."""
        return self.managed_ckpt_path or self.loaded_ckpt_path

    @ckpt_path.setter
    def ckpt_path(self, path: Any) -> None:
        self.managed_ckpt_path = self.loaded_ckpt_path = path or None

    # Callbacks.

    @property
    def checkpoint_callbacks(self) -> list[Checkpoint]:
        """All checkpoint callbacks."""
        return [callback for callback in self.callbacks if is_a(callback, Checkpoint)]

    @property
    def checkpoint_callback(self) -> Checkpoint | None:
        """The first checkpoint callback."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[EarlyStopping]:
        """All early-stopping callbacks."""
        return [callback for callback in self.callbacks if is_a(callback, EarlyStopping)]

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        """The first early-stopping callback."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def progress_bar_callback(self) -> LightningProgressBar | None:
        """The progress bar."""
        return next((callback for callback in self.callbacks if is_a(callback, LightningProgressBar)), None)

    # Optimisers.

    @property
    def lightning_optimizers(self) -> list[LightningOptimizer]:
        """The optimisers as `self.optimizers()` gives them, made anew when the optimisers change."""
        return self.wrapped_optimizers.current()

    def _clip(self, optimizer: Optimizer, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """`LightningModule.clip_gradients` comes here."""
        if clip_val > 0:
            algorithm = GradClipAlgorithmType(gradient_clip_algorithm).value
            self.connected_strategy.clip_gradients(optimizer, clip_val, algorithm)
