"""Compute training steps by a compiled or captured program, once a trial agrees with the eager step.

A step is eager until batches of its shape were seen a few times. Then comes a trial: the program is compiled or
captured, and the program and the eager step are computed from the same state. If they agree, the program computes later
steps. If not, a warning says so, and steps stay eager. If a condition on which the Python code of the step depends no
longer holds, there is another trial.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from lightning.pytorch import LightningModule
from torch import Tensor

from equipoise.extensions.compiled.blocks.block_steps import BlocksInstead, BlockSteps, deciding_context
from equipoise.extensions.compiled.comparison.costs import TrialCosts
from equipoise.extensions.compiled.interop.compiling import NewVariant
from equipoise.extensions.compiled.obstacles import check_strategy, compiles_blocks, why_eager
from equipoise.extensions.compiled.speed_comparison import SpeedComparison
from equipoise.extensions.compiled.step_program import LoggedCall, StepProgram
from equipoise.extensions.compiled.trial import Trial, end_comparison, why_compiled_again
from equipoise.extensions.compiled.variants import Variant, Variants
from equipoise.extensions.compiled.ways import Capturing, Compiling, Way
from equipoise.interop.lightning.self_log import CURRENT_HOOK
from equipoise.interop.torch.modules import has_global_hooks, has_gradient_hooks
from equipoise.parallel.optimizer_parameters import optimizer_parameters
from equipoise.parallel.step_protocols import StepResult
from equipoise.precision import Precision
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.hooks.hooks import Hooks
from equipoise.trainer.optimization.steps.automatic_step import AutomaticStep
from equipoise.trainer.optimization.steps.step_extension import Context, StepClass, StepExtension

if TYPE_CHECKING:
    from equipoise.trainer.state.run_state import RunState

__all__ = ["Compilation", "CompiledStep", "CompiledSteps"]

T = TypeVar("T")


class _Share(NamedTuple):
    """The share of a batch in its window.

    Attributes:
        weight: The weight of the batch; None if the window needs none.
        seed: The gradient with which the backward begins; None stands for 1.
    """

    weight: int | None
    seed: Tensor | None


class CompiledStep(AutomaticStep):
    """A training step that computes forward, loss and backward by one compiled program, where that is the same.

    Args:
        variants: The variants of the step, which last for several epochs.
        instead: The blocks that are compiled where the step stays eager; None if there are none.
        state: The settings and optimisers.
        precision: The precision.
        module: The user's module. This and all others are arguments of `AutomaticStep`.
        hooks: The hooks.
    """

    def __init__(
        self,
        variants: Variants,
        instead: BlocksInstead | None,
        state: "RunState",
        precision: Precision,
        module: LightningModule,
        hooks: Hooks,
        *args: Any,
        skip_backward: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(module, hooks, *args, skip_backward=skip_backward, **kwargs)
        self._attributes = vars(self.module)
        self._parameters = list(self.module.parameters())
        self._optimizers = state.optimizers
        self._precision = precision
        self._default_dtype: Callable[[], AbstractContextManager[Any]] = nullcontext
        if self._precision.autocast is None and self._precision.forward_context is not None:
            self._default_dtype = self._precision.forward_context
        self._after_backward = hooks.bind("on_after_backward")
        # The loss of an eager step, for its dtype and device.
        self._last_loss: Tensor | None = None
        # True if the gradients of the present batch are computed already.
        self._has_gradients = False
        self._trial: Trial | None = None
        # Called after the backward of an eager step whose time counts.
        self._end_eager_step: Callable[[], None] | None = None
        # Number of values that were logged before the eager step of a trial.
        self._num_pending = 0

        # The variants, unless something in this epoch needs the steps as they are.
        self._all_variants = variants
        self._variants: Variants | None = variants
        self._program = variants.program
        self._instead: BlocksInstead | None = None
        if not skip_backward:
            self._instead = instead
        reason = why_eager(state, module, hooks, skip_backward=skip_backward)
        if reason is not None:
            self._variants = None
            variants.warn_once(reason)

    def begin_batch(self, *indices: int) -> None:
        """Begin a batch of the training loader."""
        if self._instead is not None:
            self._begin_blocks(self._instead)
        AutomaticStep.begin_batch(self, *indices)

    def _begin_blocks(self, instead: BlocksInstead) -> None:
        """Compile blocks, for good, if there is an obstacle or no variant could be compiled."""
        if self._variants is None:
            self._all_variants.give_up()
        elif self._all_variants.is_given_up:
            self._variants = None
        else:
            return
        instead.begin_batch()

    def __call__(self, part: Any) -> StepResult:
        """Run the training step on a batch, with its backward if it is compiled."""
        self._has_gradients = False
        self._trial = None
        self._end_eager_step = None
        variant = None
        is_whole = not self.in_micro_batches and self._around is None
        if self._variants is not None and is_whole and not self._is_hooked():
            variant = self._variants.of(part, self.begins_window)

        # 1. The program.
        if variant is not None and self._last_loss is not None:
            if variant.comparison is not None:
                result = self._run_for_comparison(variant, variant.comparison, part)
            elif variant.is_ready:
                result = self._run_program(variant, part)
            else:
                result = None
            if result is not None:
                return result
            if not variant.is_ready and not variant.is_refused:
                self._try(variant, part)

        # 2. The eager step.
        result = AutomaticStep.__call__(self, part)
        if result.loss is not None:
            self._last_loss = result.loss.detach()
        return result

    def release_memory(self) -> None:
        """Release the memory of graphs after an out-of-memory error."""
        if self._variants is not None:
            self._variants.release_memory()

    def backward(self, result: StepResult) -> None:
        """Run the backward, unless the program has run it."""
        if self._has_gradients:
            if self._after_backward is not None:
                self._after_backward()
            return
        if self._end_eager_step is None and self._trial is None:
            AutomaticStep.backward(self, result)
            return
        # The hook after the backward may change the gradients, so the step ends before it.
        self.run_backward.before_hook = partial(self._end_watched_step, result)
        try:
            AutomaticStep.backward(self, result)
        finally:
            self.run_backward.before_hook = None
        self._end_watched_step(result)

    def _end_watched_step(self, result: StepResult) -> None:
        """End an eager step whose time counts, or whose gradients are compared. A second call has no effect."""
        if self._end_eager_step is not None:
            self._end_eager_step()
            self._end_eager_step = None
        if self._trial is not None:
            trial = self._trial
            self._trial = None
            self._judge(trial, result)

    def _is_hooked(self) -> bool:
        """Return True if a hook was registered that the program would not call."""
        if has_global_hooks() or any(map(has_gradient_hooks, self._parameters)):
            assert self._variants is not None
            self._variants.warn_once("there is a hook on the gradient of a parameter, or on all modules")
            return True
        return False

    # The program

    def _run_program(self, variant: Variant, part: Any) -> StepResult | None:
        """Compute loss and gradients by the program; None if no compiled variant fits, and nothing was computed."""
        # 1. Zero the gradients, and find the share of the batch.
        window_before = self.window.state_dict()
        share = self._share_of(part)
        if share is None:
            return None
        if self.begins_window:
            self.begins_window = False
            self._zero_grad(self.batch_idx)

        # 2. Compute.
        try:
            result = self._compute(variant.function, part, share.seed)
        except NewVariant:
            self.window.load_state_dict(window_before)
            variant.withdraw()
            return None
        self._has_gradients = True
        variant.note_use()

        # 3. Log.
        if result.logged:
            self._log(result.logged)
        return StepResult(result.loss, share.weight, result.outputs)

    def _run_for_comparison(self, variant: Variant, comparison: SpeedComparison, part: Any) -> StepResult | None:
        """Compute a step by the program or, by a result of None, eagerly; the time counts for the comparison."""
        if comparison.is_complete():
            end_comparison(variant, comparison, part)
            if variant.is_refused:
                return None
            return self._run_program(variant, part)
        step = comparison.start()
        if comparison.is_turn_of_program():
            result = self._run_program(variant, part)
            if result is not None:
                comparison.add(step, by_program=True)
            return result
        self._end_eager_step = partial(comparison.add, step, by_program=False)
        return None

    def _share_of(self, part: Any) -> _Share | None:
        """Count a batch in its window, and return its share; None if it has no weight."""
        weight = None
        factor: float | Tensor | None = None
        if self._weight_of is not None:
            weight = self._weight_of(part, self.batch_idx)
            if not weight:
                return None
            factor = self.window.add(weight)
        assert self._last_loss is not None
        return _Share(weight, self.run_backward.first_gradient(self._last_loss, factor))

    def _log(self, calls: Sequence[LoggedCall]) -> None:
        """Log what the program has noted."""
        attributes = self._attributes
        outer_hook = attributes[CURRENT_HOOK]
        attributes[CURRENT_HOOK] = "training_step"
        log = attributes["log"]
        # A logged number has the default dtype of the step.
        with self._default_dtype():
            for name, value, args, kwargs in calls:
                log(name, value, *args, **kwargs)
        attributes[CURRENT_HOOK] = outer_hook

    def _compute(self, function: Callable[..., T], part: Any, seed: Tensor | None) -> T:
        """Call the compiled program. Autocast is a part of it, but the default dtype of a precision is not."""
        with self._default_dtype():
            return self._program.run(function, part, self.batch_idx, seed)

    # The trial

    def _try(self, variant: Variant, part: Any) -> None:
        """Compile the program, and compute it for a comparison with the eager step that follows."""
        assert self._variants is not None
        # 1. A step whose Python code always does something else is not worth the time.
        if not variant.begin_trial():
            reason = variant.function.obstacle()
            if reason is None:
                reason = why_compiled_again(self._compute(variant.function.unmet_conditions, part, None))
            self._variants.refuse(variant, reason)
            return

        # 2. The share is found without counting the batch.
        window_before = self.window.state_dict()
        share = self._share_of(part)
        self.window.load_state_dict(window_before)
        if share is None:
            return

        # 3. The trial.
        trial = Trial(self._variants, variant, self.module, part)
        zeroed = chain.from_iterable(map(optimizer_parameters, self._optimizers)) if self.begins_window else ()
        trial.run(lambda: self._compute(variant.function.compile, part, share.seed), zeroed)
        self._trial = trial
        self._num_pending = len(self._logs.pending)

    def _judge(self, trial: Trial, result: StepResult) -> None:
        logged = [(entry.name, value) for entry, value, _ in self._logs.pending[self._num_pending :]]
        dtype = None
        if self._precision.autocast is not None:
            _, dtype = self._precision.autocast
        trial.judge(result.loss, result.outputs, logged, dtype)


class CompiledSteps:
    """Creates the compiled training step of each epoch. All epochs of a run use the same programs."""

    def __init__(
        self, state: "RunState", module: LightningModule, strategy: Strategy, hooks: Hooks, precision: Precision
    ) -> None:
        self._state = state
        self._precision = precision
        program = StepProgram(module, hooks.plain_step("training_step"), precision.autocast)
        way: Way
        if state.captures_steps:
            way = Capturing(strategy.root_device)
        else:
            way = Compiling(only_if_faster=state.compiles_steps == "auto")
        costs = TrialCosts(strategy.root_device, state.summary_rows, way.done)
        self._variants = Variants(program, way, costs)
        self._instead: BlocksInstead | None = None
        # Who asks for what is faster alone, or for a capture, does not ask for blocks.
        if state.compiles_steps is True:
            self._instead = BlocksInstead.of(state, module, strategy, precision, costs)

    def __call__(self, *args: Any, **kwargs: Any) -> CompiledStep:
        """Return the step of an epoch; the arguments are those of `AutomaticStep`."""
        return CompiledStep(self._variants, self._instead, self._state, self._precision, *args, **kwargs)

    def close(self) -> None:
        """Release the programs."""
        self._variants.close()
        if self._instead is not None:
            self._instead.close()


class Compilation(StepExtension):
    """Compiles or captures training steps: `Trainer(compile=...)`, `Trainer(capture=True)`."""

    def check_strategy(self, strategy: Strategy, state: "RunState") -> None:
        """Check that a strategy computes whole steps in one place, or calls blocks as they are."""
        check_strategy(strategy, state)

    def check_run(
        self, state: "RunState", module: LightningModule, strategy: Strategy, hooks: Hooks, precision: Precision
    ) -> None:
        """Check the strategy of a run that starts no processes."""
        check_strategy(strategy, state, by_hand=not module.automatic_optimization)

    def step_class(
        self, state: "RunState", module: LightningModule, strategy: Strategy, hooks: Hooks, precision: Precision
    ) -> StepClass:
        """Return what creates the step of each epoch."""
        if compiles_blocks(strategy, state, by_hand=not module.automatic_optimization):
            return BlockSteps(state, module, strategy, precision)
        return CompiledSteps(state, module, strategy, hooks, precision)

    def forward_context(self, state: "RunState", module: LightningModule, strategy: Strategy) -> Context | None:
        """Return what decides about compiled blocks in manual optimisation."""
        return None if module.automatic_optimization else deciding_context(module)
