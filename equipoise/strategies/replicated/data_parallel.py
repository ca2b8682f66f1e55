"""DataParallelStrategy: data parallelism in one process, with batches cut evenly."""

from typing import ClassVar

from equipoise.parallel.batches.shares import even_sizes
from equipoise.strategies.replicated.replicated_strategy import ReplicatedStrategy

__all__ = ["DataParallelStrategy"]


class DataParallelStrategy(ReplicatedStrategy):
    """Computes every batch in equal parts on several devices of one machine, in one process.

    Args:
        parallelize: "step": the whole `training_step`, loss included, runs on every device. "forward": only the
            module's forward does, and the rest of the step runs on `output_device`. Default: "step".
        output_device: For "forward": where outputs are gathered, an index into the devices or a device. Default: the
            first device.
        dim: The dimension of the samples. Default: 0, the first.

    Raises:
        ConfigurationError: If an argument cannot be right.

    Example:
        >>> from equipoise import DataParallelStrategy, Trainer
        >>> strategy = DataParallelStrategy(parallelize="forward")
        >>> trainer = Trainer(strategy=strategy, devices=["cpu", "cpu"], logger=False, enable_checkpointing=False)
    """

    name: ClassVar[str] = "dp"

    def sizes(self, batch_size: int) -> list[int]:
        """Sizes that differ by one at most; a batch smaller than the number of devices leaves some out."""
        return even_sizes(batch_size, len(self.devices))
