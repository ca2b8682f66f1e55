"""TrainingSteps: creates what takes the training steps of each epoch, with the extensions that the settings ask for."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.optim import Optimizer

from equipoise.parallel.batches.weighting import AccumulationWindow
from equipoise.precision import Precision
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.hooks.hooks import Hooks
from equipoise.trainer.logging.logs import Logs
from equipoise.trainer.optimization.automatic import AutomaticOptimization
from equipoise.trainer.optimization.steps.batch_weight import BatchWeight
from equipoise.trainer.optimization.steps.step_extension import StepClass, step_extensions
from equipoise.trainer.state.run_state import RunState

if TYPE_CHECKING:
    from equipoise.parallel.optimizers.combined_optimizer import CombinedOptimizer
    from equipoise.trainer.optimization.manual import ManualOptimization
    from equipoise.trainer.recovery.micro_batching import FittingSizes

__all__ = ["TrainingSteps"]


class TrainingSteps:
    """Creates what takes the training steps of each epoch of a run.

    Args:
        state: The settings, counters and optimisers.
        module: The user's module.
        strategy: The strategy.
        hooks: The hooks.
        precision: The precision.
        logs: The logged values.
        as_lightning: Returns an optimiser in the form in which `optimizer_step` receives it.
    """

    def __init__(
        self,
        state: RunState,
        module: LightningModule,
        strategy: Strategy,
        hooks: Hooks,
        precision: Precision,
        logs: Logs,
        as_lightning: Callable[[Optimizer], LightningOptimizer],
    ) -> None:
        self._state = state
        self._module = module
        self._strategy = strategy
        self._hooks = hooks
        self._precision = precision
        self._logs = logs
        self._as_lightning = as_lightning
        self._combined: CombinedOptimizer | None = None
        # The sizes that fit into memory, as far as they are known.
        self._fitting_sizes: FittingSizes = {}
        # Creates the compiled or captured step of an epoch; None if steps are eager.
        self._step_class: StepClass | None = None

    def stepped_optimizer(self) -> Optimizer:
        """Return what automatic optimisation steps: the optimiser, or several of them as one."""
        optimizers = self._state.optimizers
        if len(optimizers) == 1:
            return optimizers[0]
        from equipoise.parallel.optimizers.combined_optimizer import CombinedOptimizer

        # One object as long as the optimisers are the same: strategies know it by its identity.
        if self._combined is None or self._combined.optimizers != optimizers:
            self._combined = CombinedOptimizer(optimizers)
        return self._combined

    def begin(self) -> None:
        """Let the extensions prepare their steps, once the module is placed and there are optimisers."""
        for extension in step_extensions(self._state):
            step_class = extension.step_class(self._state, self._module, self._strategy, self._hooks, self._precision)
            self._step_class = step_class or self._step_class

    def of_epoch(
        self,
        window: AccumulationWindow,
        batch_weight: BatchWeight,
        *,
        skip_backward: bool,
        count_skipped: Callable[[], None],
    ) -> "AutomaticOptimization | ManualOptimization":
        """Return what takes the steps of an epoch.

        Args:
            window: The accumulation window.
            batch_weight: Finds the weight of a batch.
            skip_backward: Whether to run the forward only.
            count_skipped: Function that is called when `training_step` has returned None.
        """
        window.parts = self._state.accumulate_grad_batches
        parts = (self._state, self._module, self._strategy, self._hooks, self._precision, self._logs)
        if not self._module.automatic_optimization:
            from equipoise.trainer.optimization.manual import ManualOptimization

            return ManualOptimization(*parts, batch_weight)
        return AutomaticOptimization(
            *parts,
            self.stepped_optimizer(),
            window,
            batch_weight,
            as_lightning=self._as_lightning,
            skip_backward=skip_backward,
            count_skipped=count_skipped,
            step_class=self._step_class,
            fitting_sizes=self._fitting_sizes,
        )

    def close(self) -> None:
        """Release what the steps of a run share."""
        if self._step_class is not None:
            self._step_class.close()
            self._step_class = None
