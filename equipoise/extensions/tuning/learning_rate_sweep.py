"""A fit whose learning rate grows from step to step, and the losses that it notes.

The method is from Smith, Cyclical learning rates for training neural networks (2017). Rates and smoothing are those
of Lightning's LearningRateFinder, so that both draw the same curve.
"""

from typing import Any

from lightning.pytorch import Callback
from torch import Tensor

from equipoise.errors import ConfigurationError
from equipoise.extensions.tuning.interop import LearningRateSettings
from equipoise.precision import wide_dtype

__all__ = ["LearningRateSweep", "learning_rate"]

# Weight of all earlier losses in the moving mean.
_SMOOTHING = 0.98


def learning_rate(settings: LearningRateSettings, step: int) -> float:
    """Return the learning rate of a step of the search, the first of which is step 0."""
    if step == 0:
        return settings.smallest
    progress = (step + 1) / settings.steps
    if settings.mode == "linear":
        return settings.smallest + progress * (settings.largest - settings.smallest)
    growth: float = (settings.largest / settings.smallest) ** progress
    return settings.smallest * growth


class LearningRateSweep(Callback):
    """Set the learning rate of each step, and note the smoothed loss after it.

    Attributes:
        rates: Learning rates, by steps.
        losses: Smoothed losses, by steps; NaN where a step returned none.
        has_diverged: True after the search ended because the loss grew.
    """

    def __init__(self, settings: LearningRateSettings) -> None:
        self.settings = settings
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.has_diverged = False
        self._mean = 0.0
        self._smallest_loss = 0.0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Remove the schedulers, which would set other rates, or momenta.

        Raises:
            ConfigurationError: If there are several optimisers, whose rates differ.
        """
        if len(trainer.optimizers) > 1:
            raise ConfigurationError(
                "The search for a learning rate sets one rate, but `configure_optimizers` returned"
                f" {len(trainer.optimizers)} optimisers. Search with one of them, or set the rates yourself."
            )
        trainer.strategy.lr_scheduler_configs.clear()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Set the rate of the step."""
        rate = learning_rate(self.settings, trainer.global_step)
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note the loss of a batch that stepped; the batches of a window before its last one step nothing."""
        step = trainer.global_step
        if step == len(self.rates):
            return

        # 1. The loss, over all processes, so that all of them end together.
        self.rates.append(learning_rate(self.settings, step - 1))
        loss = _loss_in(outputs)
        if loss is None:
            self.losses.append(float("nan"))
            return
        wide_loss = loss.detach().to(wide_dtype(loss.device))
        value = trainer.strategy.reduce(wide_loss, reduce_op="mean").item()

        # 2. Its moving mean, with less weight on the first ones.
        self._mean = _SMOOTHING * self._mean + (1 - _SMOOTHING) * value
        smoothed = self._mean / (1 - _SMOOTHING ** (step + 1))

        # 3. The search ends when the loss grows without an end.
        divergence = self.settings.divergence
        if divergence is not None and step > 1 and smoothed > divergence * self._smallest_loss:
            self.has_diverged = True
            trainer.should_stop = True
        if smoothed < self._smallest_loss or step == 1:
            self._smallest_loss = smoothed
        self.losses.append(smoothed)


def _loss_in(outputs: Any) -> Tensor | None:
    """Return the loss among the outputs of a step, None if the step returned none."""
    if isinstance(outputs, Tensor):
        return outputs
    if not outputs:
        return None
    loss = outputs["loss"]
    assert isinstance(loss, Tensor)
    return loss
