"""Steps with the samples of all processes, which are the same for any number of processes.

A run that continues with another number of processes reads its training data in this form. One process takes whole
steps; several divide each of them (`SharedBatches`). A batch sampler with a method `deal_step(batches, count)` divides
them itself, in any run (`DealtSteps`).
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

from equipoise.errors import ConfigurationError
from equipoise.parallel.batches.sampling import DerivedSampler, sampler_with_epochs

__all__ = ["AgreedOrder", "Deal", "DealtSteps", "WholeSteps", "deal_of"]

# Returns the samples of each process, from the batches of a step and the number of processes.
Deal = Callable[[Sequence[list[Any]], int], list[list[Any]]]


def deal_of(batches: Any) -> Deal | None:
    """Return the method by which a batch sampler divides steps itself; None if it has none."""
    deal: Deal | None = getattr(batches, "deal_step", None)
    return deal


class WholeSteps(DerivedSampler):
    """A batch sampler whose batches are whole steps.

    Args:
        batches: A batch sampler that yields the same batches in all processes.
        joined: Number of its batches that make one step. Default: 1.
        size: Number of samples of a full step; None if batches differ. Default: None.
        deal: The method by which the user's batch sampler divides steps itself, for whoever divides these. Default:
            None, it has none.

    Example:
        >>> list(WholeSteps([[0, 1], [2], [3, 4]], joined=2))
        [[0, 1, 2], [3, 4]]
    """

    def __init__(self, batches: Any, joined: int = 1, size: int | None = None, deal: Deal | None = None) -> None:
        self.batch_sampler = batches
        self.joined = joined
        self.size = size
        self.deal = deal
        self.sampler = sampler_with_epochs(batches)

    def __iter__(self) -> Iterator[list[Any]]:
        # Immediately, not with the first batch: some samplers draw their order here.
        return self._steps(iter(self.batch_sampler))

    def _steps(self, batches: Iterator[list[Any]]) -> Iterator[list[Any]]:
        while True:
            batches_of_step = list(islice(batches, self.joined))
            if not batches_of_step:
                return
            yield self._step(batches_of_step)

    def _step(self, batches: list[list[Any]]) -> list[Any]:
        """Return the samples of a step that this process reads."""
        return list(chain.from_iterable(batches))

    def __len__(self) -> int:
        # Divide and round up.
        return -(-len(self.batch_sampler) // self.joined)


class DealtSteps(WholeSteps):
    """One process's part of each step, as the user's batch sampler deals it. A part may be empty.

    Args:
        batches: The batch sampler, which yields the same batches in all processes.
        deal: Divides a step that has more or fewer batches than there are processes.
        rank: The rank of this process.
        count: The number of processes.
        joined: Number of batches of a step. Default: one for each process.

    Example:
        >>> list(DealtSteps([[0, 1], [2], [3, 4]], lambda batches, count: [[3], [4]], rank=1, count=2))
        [[2], [4]]
    """

    def __init__(self, batches: Any, deal: Deal, rank: int, count: int, joined: int | None = None) -> None:
        super().__init__(batches, joined or count)
        self._divide = deal
        self.rank = rank
        self.processes = count

    def _step(self, batches: list[list[Any]]) -> list[Any]:
        if len(batches) == self.processes:
            return batches[self.rank]
        parts = self._divide(batches, self.processes)
        if len(parts) != self.processes:
            raise ConfigurationError(
                f"`deal_step` returned {len(parts)} lists of samples for {self.processes} processes, each of which"
                " needs one; an empty list is no batch."
            )
        return parts[self.rank]


class AgreedOrder(DerivedSampler):
    """The order that the main process draws from a sampler or batch sampler, in every process.

    Args:
        sampler: The sampler. Its order is drawn completely when an epoch begins.
        agree: Function that returns the main process's value in all processes.
    """

    def __init__(self, sampler: Any, agree: Callable[[list[Any]], list[Any]]) -> None:
        self.batch_sampler = self.sampler = sampler
        self.agree = agree

    def __iter__(self) -> Iterator[Any]:
        return self._agreed(iter(self.sampler))

    def _agreed(self, items: Iterator[Any]) -> Iterator[Any]:
        # Every process draws, so that its generators advance as those of a single process would.
        yield from self.agree(list(items))

    def __len__(self) -> int:
        return len(self.sampler)
