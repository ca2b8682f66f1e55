"""A callback that logs how far the processes are apart."""

from typing import Any

from equipoise import Callback, ConfigurationError


class Divergence(Callback):
    """Log `divergence` after each averaging: the distance to the mean, over all processes."""

    fires_without_batch = True

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Ask the strategy to measure it."""
        if getattr(trainer.strategy, "name", "") != "local_sgd":
            raise ConfigurationError("The callback divergence needs strategy=local_sgd. Choose it, or leave it out.")
        trainer.strategy.measure_divergence()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the last value."""
        if trainer.strategy.counts["rounds"]:
            pl_module.log("divergence", trainer.strategy.divergence)
