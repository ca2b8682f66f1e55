"""Public attributes of the Trainer, under Lightning's names."""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from lightning.pytorch.callbacks import ProgressBar as LightningProgressBar
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.precision import Precision as LightningPrecision
from lightning.pytorch.utilities.enums import GradClipAlgorithmType
from torch import Tensor
from torch.optim import Optimizer

from equipoise.interop.lightning.classes import is_a
from equipoise.names.tracebacks import shortens_tracebacks
from equipoise.precision import Precision
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.data.training_data import TrainingData
from equipoise.trainer.evaluation.evaluation_loop import EvaluationLoop
from equipoise.trainer.evaluation.prediction_loop import PredictionLoop
from equipoise.trainer.logging.results_table import to_scalars
from equipoise.trainer.loops.fit_loop import FitLoop
from equipoise.trainer.settings.devices import accelerator_of
from equipoise.trainer.state.run_state import RunState
from equipoise.trainer.surface.lightning_view import LightningNames, precision_plugin
from equipoise.trainer.surface.parts import TrainerParts
from equipoise.trainer.surface.state_fields import Reads, StateFields

__all__ = ["PublicState"]


class PublicState(StateFields, LightningNames):
    """The public attributes of a trainer.

    Attributes:
        parts: The objects of the trainer, on which a run is carried out.
        run_state: The state that the parts of a run share.
        logs: The logged values, which `self.log` and callbacks read in each step.
        precision_plugin: Lightning's plugin for the precision.
        accelerator: Lightning's accelerator of the root device.
    """

    def __init__(self, strategy: Strategy, precision: Precision, root_dir: str) -> None:
        self.run_state = RunState(root_dir=root_dir)
        super().__init__(TrainerParts(self, self.run_state, strategy, precision))
        self.logs = self.parts.logs
        self.accelerator: Accelerator = accelerator_of(strategy.root_device)
        self.precision_plugin = self._precision_plugin()

    # Type checkers would believe in any name.
    if not TYPE_CHECKING:

        @shortens_tracebacks
        def __getattr__(self, name: str) -> Any:
            """Refuse a name that there is not. Python also comes here after an error within a property."""
            if not name.startswith("_") and not hasattr(type(self), name):
                from equipoise.names.misfits import attribute_meant

                hint = attribute_meant(type(self), name)
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")
            return object.__getattribute__(self, name)

    connected_strategy = Reads[Strategy]("parts.strategy", "The strategy itself.")
    precision_in_use = Reads[Precision]("parts.precision", "The precision itself; `precision` is its name.")
    fit_loop_state = Reads[FitLoop]("parts.fit_loop", "The training loop; `fit_loop` has the names of Lightning's.")
    evaluations = Reads[dict[str, EvaluationLoop]]("parts.evaluations", "The loops of `validate` and `test`.")
    predict_loop = Reads[PredictionLoop]("parts.predict_loop", "The loop of `predict`.")

    def _precision_plugin(self) -> LightningPrecision:
        precision = self.precision_in_use
        strategy = self.connected_strategy
        return precision_plugin(precision.core, strategy.root_device.type, precision.scaler, partial(_clip, self.parts))

    def _replace_strategy(self, strategy: Strategy) -> None:
        """Run under another strategy from now on, which is connected to the same devices."""
        self.parts.replace_strategy(strategy)
        self.precision_plugin = self._precision_plugin()

    # The module.

    lightning_module = Reads[LightningModule | None]("parts.module", "The user's module, of this run or the last one.")
    model = Reads[LightningModule | None]("parts.module", "The user's module.")

    # Where it runs.

    strategy = Reads[Any]("parts.strategy_view", "The strategy, with the names of Lightning's strategies as well.")
    global_rank = Reads[int]("parts.strategy.processes.rank", "Rank of this process among all.")
    local_rank = Reads[int]("parts.strategy.processes.local_rank", "Rank of this process on its machine.")
    node_rank = Reads[int]("parts.strategy.processes.node_rank", "Rank of this machine.")
    world_size = Reads[int]("parts.strategy.processes.world_size", "Number of processes.")
    is_global_zero = Reads[bool](
        "parts.strategy.processes.is_main", "True in the process that writes files and reports to the user."
    )

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        """The arguments `num_replicas` and `rank` of a DistributedSampler; None where one process computes.

        The trainer divides loaders by itself. This is for a sampler of your own.
        """
        from equipoise.strategies.distributed.process_strategy import ProcessStrategy

        if not isinstance(self.connected_strategy, ProcessStrategy):
            return None
        arguments: dict[str, int] = self.strategy.distributed_sampler_kwargs
        return arguments

    @property
    def device_ids(self) -> list[int]:
        """The indices of the devices of this process."""
        return [device.index or 0 for device in self.connected_strategy.devices]

    @property
    def num_devices(self) -> int:
        """Number of devices on this machine."""
        strategy = self.connected_strategy
        processes_of_a_machine = strategy.processes.world_size // self.run_state.num_nodes
        return max(len(strategy.devices), processes_of_a_machine)

    precision = Reads[str]("parts.precision.name", "The name of the precision.")
    scaler = Reads[torch.amp.GradScaler | None]("parts.precision.scaler", "The loss scaler of 16-mixed.")

    # Counters.

    @property
    def global_step(self) -> int:
        """Number of optimiser steps done, over all optimisers and fits.

        A step that a scaler skips counts. In manual optimisation, each step of what `self.optimizers()` returns
        counts; a step of an optimiser that it wraps, or of another one, does not.
        """
        return self.parts.global_step

    is_last_batch = Reads[bool](
        "progress.batch.is_last_batch", "True if the present training batch is the last of the epoch."
    )
    num_training_batches = Reads[float](
        "parts.fit_loop.fit.data.max_batches", "Number of training batches of an epoch; infinite if unknown."
    )
    val_check_batch = Reads[float | None](
        "parts.fit_loop.fit.val_check_batch",
        "Number of training batches between validations; infinite: at the epoch's end; None: by the clock.",
    )
    num_val_batches = Reads[list[float]]("parts.validation.num_batches", "Validation batches of each loader.")

    @property
    def num_sanity_val_batches(self) -> list[float]:
        """Validation batches of each loader before training."""
        # It is infinite for a check of all batches.
        limit = self.run_state.num_sanity_val_steps
        return [min(limit, batches) for batches in self.fit_loop_state.val_loop.num_batches]

    @property
    def num_test_batches(self) -> list[float]:
        """Test batches of each loader."""
        return self.evaluations["test"].num_batches

    num_predict_batches = Reads[list[float]]("parts.predict_loop.max_batches", "Prediction batches of each loader.")

    # Data.

    @property
    def enable_validation(self) -> bool:
        """True if a fit validates: there is a loader, a `validation_step`, and no limit of 0."""
        data = self.parts.data
        return data is not None and data.can_validate

    @property
    def train_dataloader(self) -> Any:
        """The training loaders in use."""
        return _iterables(self.fit_loop_state.fit.data)

    @property
    def val_dataloaders(self) -> Any:
        """The validation loaders in use."""
        # A fit has loaders of its own, beside those of `validate`.
        in_fit = _iterables(self.fit_loop_state.val_loop)
        if in_fit is not None:
            return in_fit
        return _iterables(self.evaluations["validate"])

    @property
    def test_dataloaders(self) -> Any:
        """The test loaders in use."""
        return _iterables(self.evaluations["test"])

    @property
    def predict_dataloaders(self) -> Any:
        """The prediction loaders in use."""
        return _iterables(self.predict_loop)

    # Values.

    callback_metrics = Reads[dict[str, Any]]("logs.callback_metrics", "Logged values, as callbacks see them.")
    logged_metrics = Reads[dict[str, Any]]("logs.logged_metrics", "Logged values for the loggers.")

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """Logged values for the progress bar, read from the devices."""
        return to_scalars(self.logs.progress_bar_metrics)

    progress_bar_values = Reads[dict[str, Tensor]](
        "logs.progress_bar_metrics", "The same, on their devices: for a progress bar that never waits for one."
    )

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Hand values to the loggers; see `LoggerOutput.log_metrics`."""
        self.parts.logger_output.log_metrics(metrics, step)

    def hand_over_last_step(self) -> None:
        """Hand the values of the last training step to listeners; see `LoggerOutput.hand_over_last_step`."""
        self.parts.logger_output.hand_over_last_step()

    # Files.

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        if not self.loggers:
            return None
        return self.loggers[0]

    @logger.setter
    def logger(self, logger: Logger | None) -> None:
        self.loggers = [logger] if logger else []

    @property
    def log_dir(self) -> str | None:
        """The folder of the run: that of the first logger, else `default_root_dir`; the same in every process."""
        return self.parts.log_dir(self.default_root_dir)

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
        return self.parts.lightning_optimizers()


def _iterables(owner: TrainingData | EvaluationLoop | PredictionLoop) -> Any:
    """Return loaders, in the form in which the user has passed them; None before it has any."""
    if owner.loaders is None:
        return None
    return owner.loaders.iterables


def _clip(
    parts: TrainerParts, optimizer: Optimizer, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm"
) -> None:
    """Clip gradients for `LightningModule.clip_gradients`."""
    if clip_val > 0:
        algorithm = GradClipAlgorithmType(gradient_clip_algorithm).value
        parts.fit_loop.optimization.unscale(optimizer)
        parts.strategy.clip_gradients(optimizer, clip_val, algorithm)
