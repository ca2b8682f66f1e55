"""The parts of a run of a module, for tests of what takes them, without a loop."""

from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn

from equipoise import Trainer
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.hooks.hooks import Hooks
from equipoise.trainer.preparation import begin_run
from equipoise.trainer.runtime.request import Request
from equipoise.trainer.state.run_state import RunState

__all__ = ["parts_of_fit"]


def parts_of_fit(
    module: L.LightningModule, optimizer: Any = None, **arguments: Any
) -> tuple[RunState, L.LightningModule, Strategy, Hooks]:
    """Return state, module, strategy and hooks of a fit on the CPU, with the module placed and the optimiser known.

    Args:
        module: The module.
        optimizer: The optimiser of the fit. Default: none.
        arguments: Arguments of the Trainer.
    """
    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(**{**options, **arguments})
    module.trainer = trainer  # type: ignore[assignment]
    parts = trainer.parts
    hooks, _ = begin_run(parts, Request(TrainerFn.FITTING, module))
    parts.strategy.setup(module, parts.precision)
    if optimizer is not None:
        trainer.optimizers = [optimizer]
    return parts.state, module, parts.strategy, hooks
