"""TrainerParts: the objects of a trainer that outlive its runs.

A run is carried out on them. The trainer itself is one of them, but only as the first argument of hooks.
"""

from dataclasses import dataclass, field, fields
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from equipoise.interop.lightning.classes import is_a
from equipoise.interop.lightning.optimizers import wrap_optimizer
from equipoise.precision import Precision
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.data.loaders import Source
from equipoise.trainer.evaluation.batch_steps import EvaluationSteps
from equipoise.trainer.evaluation.evaluation_loop import EvaluationLoop
from equipoise.trainer.evaluation.prediction_loop import PredictionLoop
from equipoise.trainer.hooks.hooks import Hooks
from equipoise.trainer.logging.logger_output import LoggerOutput
from equipoise.trainer.logging.logs import Logs
from equipoise.trainer.loops.fit_loop import FitLoop
from equipoise.trainer.optimization.training_steps import TrainingSteps
from equipoise.trainer.runtime.run_data import RunData
from equipoise.trainer.runtime.signals import EndOnSignal
from equipoise.trainer.state.run_state import RunState
from equipoise.trainer.surface.strategy_view import StrategyView

__all__ = ["TrainerParts"]


@dataclass(eq=False)
class TrainerParts:
    """The objects of which a trainer consists.

    Attributes:
        trainer: The trainer, which hooks, modules and Lightning's functions receive; no part of a run reads it.
        state: Settings, stage, counters, callbacks, loggers and optimisers.
        strategy: The strategy, connected to its devices.
        precision: The precision.
        logs: The logged values.
        logger_output: Hands logged values to the loggers.
        fit_loop: The training loop, which holds the loop of its validations.
        evaluations: The loops of `validate` and `test`, by these names.
        predict_loop: The loop of `predict`.
        hooks: The hooks of the present or last run; None before the first.
        data: Its data; None before the first.
        strategy_view: The strategy in the form of Lightning's.
        is_computing: True in a process that carries out a run, until its loop has ended.
    """

    # What users configure.
    trainer: Any
    state: RunState
    strategy: Strategy
    precision: Precision

    # What runs write to.
    logs: Logs = field(init=False, default_factory=Logs)
    logger_output: LoggerOutput = field(init=False)

    # The loops, whose states a second run continues with.
    fit_loop: FitLoop = field(init=False)
    evaluations: dict[str, EvaluationLoop] = field(init=False)
    predict_loop: PredictionLoop = field(init=False)
    hooks: Hooks | None = field(init=False, default=None)
    data: RunData | None = field(init=False, default=None)
    strategy_view: StrategyView = field(init=False)
    is_computing: bool = field(init=False, default=False)
    _wrapped_optimizers: list[LightningOptimizer] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        state = self.state
        self.logger_output = LoggerOutput(state, self.logs, self.trainer)
        val_loop = EvaluationLoop(state, "val", fitting=True)
        self.fit_loop = FitLoop(state, self.logger_output, val_loop, self.is_validation_enabled)
        self.evaluations = {"validate": EvaluationLoop(state, "val"), "test": EvaluationLoop(state, "test")}
        self.predict_loop = PredictionLoop(state)
        self.replace_strategy(self.strategy)

    def replace_strategy(self, strategy: Strategy) -> None:
        """Carry out the next runs under a strategy."""
        self.strategy = strategy
        self.strategy_view = StrategyView(self.strategy, self.state, self)
        self._wrapped_optimizers = []

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but the present run, on its way to another process."""
        state = {declared.name: getattr(self, declared.name) for declared in fields(self)}
        # A process that receives the parts begins a run of its own, with its own optimisers.
        state["hooks"] = None
        state["data"] = None
        state["_wrapped_optimizers"] = []
        return state

    def is_validation_enabled(self) -> bool:
        """Return the trainer's `enable_validation`, which a subclass may override."""
        enabled: bool = self.trainer.enable_validation
        return enabled

    def begin_run(self, hooks: Hooks, data: RunData) -> None:
        """Let the loops take the parts of a new run, and forget the loaders of earlier ones."""
        self.hooks = hooks
        self.data = data
        module = hooks.module
        strategy = self.strategy
        # A subclass of the Trainer may override the method.
        end = EndOnSignal(self.state, strategy, self.trainer.save_checkpoint)
        parts = (self.state, module, strategy, hooks, self.precision, self.logs)
        self.fit_loop.begin_run(module, strategy, hooks, data, TrainingSteps(*parts, self.as_lightning), end)
        steps = EvaluationSteps(*parts, data, end)
        for loop in (self.fit_loop.val_loop, *self.evaluations.values()):
            loop.begin_run(module, strategy, hooks, self.logger_output, data, steps)
        self.predict_loop.begin_run(module, strategy, hooks, data, steps)

    def lightning_optimizers(self) -> list[LightningOptimizer]:
        """Return the optimisers as `self.optimizers()` gives them, the same objects as long as these are the same."""
        optimizers = self.state.optimizers
        if [wrapped.optimizer for wrapped in self._wrapped_optimizers] != optimizers:
            self._wrapped_optimizers = [wrap_optimizer(optimizer, self.strategy_view) for optimizer in optimizers]
        return self._wrapped_optimizers

    def as_lightning(self, optimizer: Optimizer) -> LightningOptimizer:
        """Return what automatic optimisation steps as `optimizer_step` receives it."""
        wrapped = self.lightning_optimizers()
        return wrapped[0] if len(wrapped) == 1 else wrap_optimizer(optimizer, self.strategy_view)

    @property
    def states_of_loops(self) -> list[object]:
        """The objects with the state of the loops, in an order that is the same in all processes."""
        fit = self.fit_loop.fit
        return [fit, fit.data, self.fit_loop.val_loop, *self.evaluations.values(), self.predict_loop]

    @property
    def active_evaluation(self) -> EvaluationLoop | PredictionLoop | None:
        """The evaluation or prediction loop that runs; None if none does."""
        state = self.state
        if state.predicting:
            return self.predict_loop
        if not state.evaluating and not state.sanity_checking:
            return None
        if state.status.fn is None or state.fitting:
            return self.fit_loop.val_loop
        return self.evaluations[state.status.fn.value]

    @property
    def validation(self) -> EvaluationLoop:
        """The loop of `validate` while that runs, else that of the validations in a fit."""
        if self.state.status.fn == TrainerFn.VALIDATING:
            return self.evaluations["validate"]
        return self.fit_loop.val_loop

    @property
    def module(self) -> LightningModule | None:
        """The user's module, of this run or the last one."""
        return None if self.hooks is None else self.hooks.module

    def source_of(self, stage: str) -> Source:
        """Return the origin of a stage's loaders, in the form in which Lightning's objects ask for it."""
        return Source(stage) if self.data is None else self.data.sources[stage]

    @property
    def global_step(self) -> int:
        """Number of optimiser steps done, over all optimisers; it is not reset."""
        progress = self.state.progress
        return progress.optimizer_step.completed if self.hooks is None else progress.global_step(self.hooks.module)

    def log_dir(self, root_dir: str) -> str | None:
        """Return the folder of the run, the same in every process: that of the first logger, or another.

        Args:
            root_dir: The folder of a run without loggers.
        """
        folder: str | None = root_dir
        if self.state.loggers:
            logger = self.state.loggers[0]
            folder = logger.log_dir if is_a(logger, TensorBoardLogger, CSVLogger) else logger.save_dir
        return self.strategy.processes.broadcast(folder)
