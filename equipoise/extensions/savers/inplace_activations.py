"""InplaceActivations: activation functions that overwrite their input where that is right."""

import inspect
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from equipoise.callbacks.callback import Callback
from equipoise.errors import ConfigurationError
from equipoise.extensions.savers.inplace import InplaceChoice, keep_inputs, use_inplace_activations
from equipoise.extensions.savers.interop import INPLACE
from equipoise.interop.adapters import check_feature
from equipoise.parallel.snapshot.batch_contents import BatchContents

__all__ = ["InplaceActivations"]


class InplaceActivations(Callback):
    """Let activation functions such as `nn.ReLU` overwrite their input where nothing else needs it.

    Before the first step of a fit, the training step is computed a few times on its batch, without side effects. An
    activation function is changed if no later operation uses its input, nothing keeps the input, and loss and gradients
    stay the same to the bit. After the fit the module is as before. See
    `equipoise.extensions.savers.inplace.use_inplace_activations` for modules outside of a trainer.

    It works on one device in one process.

    Attributes:
        choice: The names of the submodules that overwrite their input, and the reasons why others do not.

    Raises:
        ConfigurationError: If the run has several devices or processes, the module optimises by hand, or torch does not
            report operations.

    Example:
        >>> from equipoise import InplaceActivations, Trainer
        >>> inplace = InplaceActivations()
        >>> Trainer(callbacks=[inplace], max_epochs=1).fit(module, loader)  # doctest: +SKIP
        >>> inplace.choice.changed  # doctest: +SKIP
        ('net.1', 'net.3')
    """

    saves_memory = True

    def __init__(self) -> None:
        check_feature(INPLACE)
        self.choice = InplaceChoice()
        self._is_due = False

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Check that the module can be tried out."""
        if trainer.world_size > 1 or trainer.num_devices > 1:
            raise ConfigurationError(
                "InplaceActivations tries the training step on one device in one process, but there are several."
                " Set inplace=True in the module, or choose strategy='single_device'."
            )
        if not pl_module.automatic_optimization:
            raise ConfigurationError(
                "InplaceActivations repeats the training step, which must not optimise by hand. Set inplace=True in the"
                " module instead."
            )
        self.choice = InplaceChoice()
        self._is_due = True

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Choose the activation functions with the first batch."""
        if not self._is_due:
            return
        self._is_due = False
        arguments = (batch, batch_idx)[: len(inspect.signature(pl_module.training_step).parameters)]
        contents = BatchContents(batch)
        silent = {"log": _log_nothing, "log_dict": _log_nothing}

        def step() -> Any:
            # The attributes are restored after each step.
            vars(pl_module).update(silent)
            try:
                with torch.enable_grad(), trainer.precision_plugin.forward_context():
                    return pl_module.training_step(*arguments)
            finally:
                contents.restore()

        self.choice = use_inplace_activations(pl_module, step)
        rank_zero_info(_describe(self.choice))

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Let the module be as before."""
        self._is_due = False
        keep_inputs(pl_module, self.choice.changed)

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Let the module be as before."""
        self.teardown(trainer, pl_module, "fit")


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for `self.log` in a step that does not count."""


def _describe(choice: InplaceChoice) -> str:
    changed = ", ".join(choice.changed) or "none"
    reasons = [f"{name} ({reason})" for name, reason in choice.unchanged.items()]
    text = f"In-place activations: {changed}."
    if reasons:
        text += f" Not: {', '.join(reasons)}."
    return text
