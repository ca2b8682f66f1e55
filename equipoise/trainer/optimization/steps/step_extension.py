"""Extensions that change how training steps are computed, where an argument of the Trainer asks for one."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from lightning.pytorch import LightningModule
from torch.optim import Optimizer

from equipoise.names.extensions import load_extension
from equipoise.precision import Precision
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.hooks.hooks import Hooks

if TYPE_CHECKING:
    from equipoise.trainer.state.run_state import RunState

__all__ = ["Context", "InnerStep", "StepClass", "StepExtension", "step_extensions"]

Context = Callable[[], AbstractContextManager[Any]]


class StepClass(Protocol):
    """Creates the training step of each epoch."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the step of an epoch, an `AutomaticStep`; the arguments are those of its constructor."""

    def close(self) -> None:
        """Release what the steps of a run share."""


class InnerStep(Protocol):
    """The step of an optimiser within the backward of a batch."""

    def begin(self, batch_idx: int) -> None:
        """Zero the gradients, and begin a step."""

    def finish(self) -> None:
        """End the step, after the backward."""

    def close(self) -> None:
        """Remove hooks."""


class StepExtension:
    """Changes how training steps are computed. Its defaults change nothing."""

    def check_strategy(self, strategy: Strategy, state: "RunState") -> None:
        """Check, before processes start, that steps of a strategy can be computed this way.

        Raises:
            ConfigurationError: If they cannot.
        """

    def check_run(
        self, state: "RunState", module: LightningModule, strategy: Strategy, hooks: Hooks, precision: Precision
    ) -> None:
        """Check a fit before its optimisers are created.

        Raises:
            ConfigurationError: If its steps cannot be computed this way.
        """

    def check_optimizer(self, optimizer: Any) -> None:
        """Check what `configure_optimizers` has returned.

        Raises:
            ConfigurationError: If it cannot be stepped this way.
        """

    def step_class(
        self, state: "RunState", module: LightningModule, strategy: Strategy, hooks: Hooks, precision: Precision
    ) -> StepClass | None:
        """Return what creates the training step of each epoch; None for the usual step."""
        return None

    def forward_context(self, state: "RunState", module: LightningModule, strategy: Strategy) -> Context | None:
        """Return the context of a training step's forward, within that of the precision; None if it needs none."""
        return None

    def inner_step(
        self,
        state: "RunState",
        optimizer: Optimizer,
        zero_grad: Callable[[int], None],
        clip: Callable[[Optimizer], None],
    ) -> InnerStep | None:
        """Return the optimiser's step within the backward; None if it comes after the backward.

        Args:
            state: The settings.
            optimizer: The optimiser.
            zero_grad: Function that zeroes the gradients. It receives the number of the batch.
            clip: Function that clips the gradients of the optimiser, if the settings say so.
        """
        return None


def step_extensions(state: "RunState") -> list[StepExtension]:
    """Return the extensions that the arguments of the Trainer ask for.

    Raises:
        ConfigurationError: If one is not installed.
    """
    is_wanted = {
        "compile": bool(state.compiles_steps) or state.captures_steps,
        "step_in_backward": state.steps_in_backward,
        "offload_activations": state.offload_least_bytes is not None,
    }
    return [load_extension("steps", name)() for name in is_wanted if is_wanted[name]]
