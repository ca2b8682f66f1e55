"""RunContext of a module, for tests of the parts of a run without a loop."""

from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn

from equipoise import Trainer
from equipoise.trainer.preparation import make_context
from equipoise.trainer.runtime.request import Request
from equipoise.trainer.runtime.run_context import RunContext

__all__ = ["training_context"]


def training_context(
    module: L.LightningModule, optimizer: Any = None, loaders: dict[str, Any] | None = None, **arguments: Any
) -> RunContext:
    """Return the context of a fit on the CPU, with the module placed and the optimiser known.

    Args:
        module: The module.
        optimizer: The optimiser of the fit. Default: none.
        loaders: The loaders by stage, "train" or "val". Default: the module's own.
        arguments: Arguments of the Trainer.
    """
    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(**{**options, **arguments})
    module.trainer = trainer  # type: ignore[assignment]
    context = make_context(trainer.parts, Request(TrainerFn.FITTING, module, loaders=loaders or {}))
    trainer.parts.begin_run(context)
    context.strategy.setup(module, context.precision)
    if optimizer is not None:
        trainer.optimizers = [optimizer]
    return context
