"""A callback that logs how far the processes are apart."""

from typing import Any

from equipoise import Callback, ConfigurationError


class Divergence(Callback):
    """Log `divergence` after each averaging: the root mean square, over the processes, of the distance to the mean."""

    fires_without_batch = True

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Ask the strategy to measure it."""
        if not hasattr(trainer.strategy, "measure_divergence"):
            raise ConfigurationError("The callback divergence needs strategy=local_sgd. Choose it, or leave it out.")
        trainer.strategy.measure_divergence()
        self.rounds = trainer.strategy.counts["rounds"]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the last value, if there is a new one."""
        strategy = trainer.strategy
        if strategy.counts["rounds"] > self.rounds:
            self.rounds = strategy.counts["rounds"]
            pl_module.log("divergence", strategy.divergence, batch_size=1)
