"""TrainingSteps: creates what takes the training steps of each epoch, with the extensions that the settings ask for."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.optim import Optimizer

from equipoise.parallel.batches.weighting import AccumulationWindow
from equipoise.precision import Precision
from equipoise.strategies.strategy import Strategy, splitter_of
from equipoise.trainer.hooks.hooks import Hooks
from equipoise.trainer.logging.logs import Logs
from equipoise.trainer.optimization.automatic import AutomaticOptimization
from equipoise.trainer.optimization.steps.automatic_step import AutomaticStep
from equipoise.trainer.optimization.steps.backward import Backward
from equipoise.trainer.optimization.steps.batch_weight import BatchWeight
from equipoise.trainer.optimization.steps.module_step import training_forward_context
from equipoise.trainer.optimization.steps.step_extension import StepClass, step_extensions
from equipoise.trainer.optimization.steps.window_gradients import WindowGradients
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

    Attributes:
        weight: Finds the weight of a batch.
    """

    weight: BatchWeight

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
        """Prepare the steps, once the module is placed and there are optimisers."""
        self.weight = BatchWeight(splitter_of(self._strategy, self._module), self._strategy.processes.data.world_size)
        for extension in step_extensions(self._state):
            step_class = extension.step_class(self._state, self._module, self._strategy, self._hooks, self._precision)
            self._step_class = step_class or self._step_class

    def of_epoch(
        self, window: AccumulationWindow, *, skip_backward: bool
    ) -> "AutomaticOptimization | ManualOptimization":
        """Return what takes the steps of an epoch.

        Args:
            window: The accumulation window.
            skip_backward: Whether to run the forward only.
        """
        state = self._state
        module = self._module
        strategy = self._strategy
        hooks = self._hooks
        precision = self._precision
        window.parts = state.accumulate_grad_batches
        if not module.automatic_optimization:
            from equipoise.trainer.optimization.manual import ManualOptimization

            return ManualOptimization(state, module, strategy, hooks, precision, self._logs, self.weight)

        # 1. The gradients, and the step that computes them.
        gradients = WindowGradients(
            state, strategy, hooks, precision, window, self.stepped_optimizer(), skip_backward=skip_backward
        )
        step: AutomaticStep = (self._step_class or AutomaticStep)(
            module,
            hooks,
            self._logs,
            training_forward_context(state, module, strategy, precision),
            Backward(strategy, hooks, precision),
            gradients,
            self.weight,
            skip_backward=skip_backward,
        )

        # 2. Another attempt, if a callback decides about out-of-memory errors.
        recovery = None
        if hooks.recovers and not skip_backward:
            from equipoise.trainer.recovery.recovery import Recovery

            recovery = Recovery(state, module, strategy, hooks, self._logs, step, self._fitting_sizes)
        return AutomaticOptimization(state, strategy, hooks, gradients, step, recovery, self._as_lightning)

    def close(self) -> None:
        """Release what the steps of a run share."""
        if self._step_class is not None:
            self._step_class.close()
            self._step_class = None
