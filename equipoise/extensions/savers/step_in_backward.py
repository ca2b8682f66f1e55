"""The optimiser's step as a part of the backward; see `Trainer(step_in_backward=True)`.

    usual            backward: gradient of every parameter        step: every parameter
    in the backward  gradient of d, step of d, gradient of d freed, gradient of c, step of c, ...

So the gradients of all parameters never exist together. A gradient is complete when torch calls the hooks after its
accumulation: in one backward, torch accumulates the gradient of a tied parameter once, over all of its uses.
"""

from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from equipoise.errors import StepError
from equipoise.extensions.savers.step_obstacles import check_clipping, check_optimizer, check_run
from equipoise.interop.torch.optimizers import only_parameter, plain_step
from equipoise.precision import Precision
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.hooks.hooks import Hooks
from equipoise.trainer.optimization.steps.step_extension import StepExtension

if TYPE_CHECKING:
    from equipoise.trainer.state.run_state import RunState

__all__ = ["StepInBackward", "SteppingInBackward"]


class StepInBackward:
    """Steps each parameter of an optimiser as soon as its gradient is complete, and frees the gradient.

    The optimiser stays the user's object, with its states, groups and schedulers. For the step of one parameter it
    has no other parameter. That gives the same numbers for optimisers that treat each parameter by itself, as all of
    torch do except LBFGS.

    Args:
        optimizer: The optimiser.
        zero_grad: Function that zeroes the gradients. It receives the number of the batch.
        clip: Function that clips the gradients of the optimiser value by value, where that is wanted, or raises an
            error.
    """

    def __init__(
        self, optimizer: Optimizer, zero_grad: Callable[[int], None], clip: Callable[[Optimizer], None]
    ) -> None:
        self._optimizer = optimizer
        self._step = plain_step(optimizer)
        self._zero_grad = zero_grad
        self._clip = clip
        self._is_open = False
        self._stepped: set[int] = set()
        # Backwards of several devices run in several threads, but the optimiser takes one step after the other.
        self._lock = Lock()
        self._groups: list[dict[str, Any]] = []
        self._group_of: dict[int, dict[str, Any]] = {}
        self._number_of_groups = 0
        self._handles = []
        self._find_groups()
        # A frozen parameter takes no hook. If it is unfrozen within the epoch, `finish` steps it.
        for group in self._groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    self._handles.append(parameter.register_post_accumulate_grad_hook(self._on_gradient))

    def begin(self, batch_idx: int) -> None:
        """Zero the gradients, and begin a step.

        Args:
            batch_idx: The number of the batch.
        """
        self._zero_grad(batch_idx)
        # A callback may have added a group, or loaded a state, which brings new groups.
        has_new_groups = self._optimizer.param_groups is not self._groups
        if has_new_groups or len(self._groups) != self._number_of_groups:
            self._find_groups()
        # From here on, each gradient is one of this step.
        self._stepped.clear()
        self._is_open = True

    def finish(self) -> None:
        """End the step: step the parameters that have a gradient still, such as those that were unfrozen meanwhile."""
        self._is_open = False
        if any(parameter.grad is not None for group in self._groups for parameter in group["params"]):
            self._clip(self._optimizer)
            self._step()

    def close(self) -> None:
        """Remove the hooks."""
        self._is_open = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _find_groups(self) -> None:
        self._groups = self._optimizer.param_groups
        self._number_of_groups = len(self._groups)
        self._group_of = {}
        for group in self._groups:
            for parameter in group["params"]:
                self._group_of[id(parameter)] = group

    def _on_gradient(self, parameter: Tensor) -> None:
        """Step a parameter whose gradient is complete. Backwards outside of a training step are left alone."""
        if not self._is_open:
            return
        with self._lock:
            if id(parameter) in self._stepped:
                raise StepError(
                    "step_in_backward=True steps a parameter when its gradient is complete, but a parameter of shape"
                    f" {list(parameter.shape)} received a second gradient in the same step. A second backward within"
                    " `training_step` does that, or a checkpoint with use_reentrant=True around a tied parameter."
                    " Leave step_in_backward out."
                )
            self._stepped.add(id(parameter))
            self._step_alone(parameter)
            # The memory is free for the next gradient.
            parameter.grad = None

    def _step_alone(self, parameter: Tensor) -> None:
        """Clip and step one parameter, while the optimiser has no other."""
        group = self._group_of[id(parameter)]
        with only_parameter(self._optimizer, group, parameter):
            self._clip(self._optimizer)
            self._step()


class SteppingInBackward(StepExtension):
    """Steps the optimiser within the backward: `Trainer(step_in_backward=True)`."""

    def check_run(
        self, state: "RunState", module: LightningModule, strategy: Strategy, hooks: Hooks, precision: Precision
    ) -> None:
        """Check all but the optimiser."""
        check_run(state, module, strategy, hooks, precision)

    def check_optimizer(self, optimizer: Any) -> None:
        """Check that an optimiser treats each parameter by itself."""
        check_optimizer(optimizer)

    def inner_step(
        self,
        state: "RunState",
        optimizer: Optimizer,
        zero_grad: Callable[[int], None],
        clip: Callable[[Optimizer], None],
    ) -> StepInBackward:
        """Return the optimiser's step within the backward."""

        def checked_clip(optimizer: Optimizer) -> None:
            # Callbacks may change how gradients are clipped.
            check_clipping(state)
            clip(optimizer)

        return StepInBackward(optimizer, zero_grad, checked_clip)
