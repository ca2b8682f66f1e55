"""Checks before a run of a module whose steps pull their batches: `training_step(self, dataloader_iter)` and others."""

from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import GradientAccumulationScheduler

from equipoise.errors import ConfigurationError
from equipoise.interop.lightning.classes import is_a, takes_iterator

if TYPE_CHECKING:
    from equipoise.trainer.runtime.run_context import RunContext

__all__ = ["accumulation_refused", "check_iterator_step"]


def check_iterator_step(context: "RunContext", name: str) -> None:
    """Check that steps can be exact if they pull their batches by themselves.

    Raises:
        ConfigurationError: Naming the obstacle and a remedy.
    """
    # 1. The arguments of the step.
    state = context.state
    strategy = context.strategy
    step = f"`{type(context.module).__name__}.{name}(dataloader_iter)`"
    if not takes_iterator(context.module, name, alone=True):
        raise ConfigurationError(
            f"{step} takes the iterator alone: `(self, dataloader_iter)`. The index comes with each batch:"
            " `batch, batch_idx, dataloader_idx = next(dataloader_iter)`."
        )

    # 2. Strategies and callbacks that would divide a batch.
    if not strategy.keeps_batches_whole:
        raise ConfigurationError(
            f"{step} pulls its batches by itself, so strategy={strategy.name!r} cannot give each device or process its"
            f" part. Take strategy='single_device' with one device, or `{name}(self, batch, batch_idx)`."
        )
    if context.recovers:
        raise ConfigurationError(
            f"{step} cannot be done again after an error of memory, since the batches that it pulled are gone. Leave"
            f" OOMRecovery and other callbacks with `on_out_of_memory` out, or take `{name}(self, batch, batch_idx)`."
        )

    # 3. Accumulation.
    if name != "training_step":
        return
    schedules = any(is_a(callback, GradientAccumulationScheduler) for callback in state.callbacks)
    if state.accumulate_grad_batches != 1 or schedules:
        raise accumulation_refused(step)


def accumulation_refused(step: str) -> ConfigurationError:
    """Return the error for accumulation over steps that pull their batches by themselves.

    Args:
        step: The step, as the message names it.
    """
    return ConfigurationError(
        f"{step} pulls as many batches as it likes, so the trainer cannot know how much each weighs in an accumulated"
        " gradient, nor which step is the epoch's last. Leave accumulate_grad_batches and"
        " GradientAccumulationScheduler out, and pull all batches of an optimiser step in one `training_step`."
    )
