"""Steps with the samples of all processes, which keep them whatever the number of processes is.

A run that continues with another number of processes reads its training data in this form. One process takes whole
steps; several divide each of them (`SharedBatches`).
"""

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

from torch.utils.data import Sampler

__all__ = ["AgreedOrder", "WholeSteps"]


class WholeSteps(Sampler[list[Any]]):
    """A batch sampler whose batches are whole steps.

    Args:
        batches: A batch sampler that yields the same batches in all processes.
        joined: Number of its batches that make one step. Default: 1.
        size: Number of samples of a full step; None if batches differ. Default: None.

    Example:
        >>> list(WholeSteps([[0, 1], [2], [3, 4]], joined=2))
        [[0, 1, 2], [3, 4]]
    """

    def __init__(self, batches: Any, joined: int = 1, size: int | None = None) -> None:
        self.batch_sampler = batches
        self.joined = joined
        self.size = size
        # The trainer calls `set_epoch` of the loader's `sampler`.
        if callable(getattr(batches, "set_epoch", None)):
            self.sampler = batches
        else:
            self.sampler = getattr(batches, "sampler", None)

    def __iter__(self) -> Iterator[list[Any]]:
        # Immediately, not with the first batch: some samplers draw their order here.
        batches: Iterator[list[Any]] = iter(self.batch_sampler)
        return self._steps(batches)

    def _steps(self, batches: Iterator[list[Any]]) -> Iterator[list[Any]]:
        while True:
            batches_of_step = list(islice(batches, self.joined))
            if not batches_of_step:
                return
            yield list(chain.from_iterable(batches_of_step))

    def __len__(self) -> int:
        # Divide and round up.
        return -(-len(self.batch_sampler) // self.joined)


class AgreedOrder(Sampler[Any]):
    """The order that the main process draws from a sampler or batch sampler, in every process.

    Args:
        sampler: The sampler. Its order is drawn completely when an epoch begins.
        agree: Function that returns the main process's value in all processes.
    """

    def __init__(self, sampler: Any, agree: Callable[[list[Any]], list[Any]]) -> None:
        self.sampler = sampler
        self.agree = agree

    def __iter__(self) -> Iterator[Any]:
        items: Iterator[Any] = iter(self.sampler)
        return self._agreed(items)

    def _agreed(self, items: Iterator[Any]) -> Iterator[Any]:
        # Every process draws, so that its generators move on as those of one process would.
        order = list(items)
        yield from self.agree(order)

    def __len__(self) -> int:
        return len(self.sampler)
