"""Seeds of the random numbers that the stages of a pipeline draw."""

import hashlib

import torch

__all__ = ["StepSeeds"]


class StepSeeds:
    """Seeds that follow from torch's seed and from the number of steps so far.

    Args:
        replica: Number of the replica; replicas have different seeds. Default: 0.

    Attributes:
        steps: Number of training steps so far.

    Example:
        >>> generator = torch.manual_seed(1)
        >>> seeds = StepSeeds()
        >>> seeds.begin_step()
        >>> first = seeds.training_seed()
        >>> resumed = StepSeeds()
        >>> resumed.begin_step()
        >>> resumed.training_seed() == first
        True
    """

    def __init__(self, replica: int = 0) -> None:
        self.steps = 0
        self._suffix = ""
        if replica:
            self._suffix = f", replica {replica}"
        self._evaluations = 0

    def begin_step(self) -> None:
        """Count a training step, whether it calls the network or not: all replicas count the same steps."""
        self.steps += 1
        self._evaluations += 1

    def training_seed(self) -> int:
        """Return the seed of the present training step. It is the same in a run that was interrupted and resumed."""
        return _seed_of(f"{self.steps}{self._suffix}")

    def next_evaluation_seed(self) -> int:
        """Return the seed of a call of the network outside of training steps."""
        self._evaluations += 1
        return _seed_of(f"{self.steps}, {self._evaluations}{self._suffix}")


def _seed_of(count: str) -> int:
    """Return a seed of 48 bits that follows from torch's and a count."""
    text = f"{torch.initial_seed()}, {count}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little")
