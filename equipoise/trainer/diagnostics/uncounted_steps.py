"""A warning where weights change in manual optimisation, but no optimiser step is counted."""

from lightning.pytorch import LightningModule

from equipoise.interop.torch.modules import versions
from equipoise.notices import rank_zero_warn
from equipoise.trainer.state.run_state import RunState

__all__ = ["UncountedSteps"]


class UncountedSteps:
    """Compares weights and counter at the ends of epochs, and warns once in a fit.

    Args:
        state: Contains the counters.
        module: The user's module.
    """

    def __init__(self, state: RunState, module: LightningModule) -> None:
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._steps = state.progress.manual_step
        self._steps_before = 0
        self._versions_before: list[int] | None = None

    def begin_epoch(self) -> None:
        """Note weights and counter."""
        self._steps_before = self._steps.completed
        self._versions_before = versions(self._parameters)

    def end_epoch(self) -> None:
        """Warn if weights have changed since `begin_epoch` and no step was counted."""
        if self._versions_before is None or self._steps.completed > self._steps_before:
            return
        if versions(self._parameters) == self._versions_before:
            return
        self._parameters.clear()
        rank_zero_warn(
            "Weights have changed in this epoch, but no optimiser step was counted: `global_step` stands still, and so"
            " does all that goes by steps, such as max_steps and ModelCheckpoint. Steps count if they are taken by what"
            " `self.optimizers()` returns: return each optimiser from `configure_optimizers`, and call"
            " `self.optimizers().step()`, neither `.optimizer.step()` nor an optimiser that was kept elsewhere."
        )
