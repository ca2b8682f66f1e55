"""Batch samplers around that of a loader: without its first batches, with the same in each pass, recording them."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Sampler

from equipoise.parallel.batches.sampling import DrawnAlike

__all__ = ["FirstDrawn", "Recorder", "RemainingBatches", "with_first_fetched"]


def with_first_fetched(batches: Iterator[Any]) -> Iterator[Any]:
    """Fetch the first batch now, and return an iterator over all of them."""
    return itertools.chain(list(itertools.islice(batches, 1)), batches)


class RemainingBatches:
    """A batch sampler without its first batches.

    A loader's iterator draws a random number after it has asked the batch sampler for an iterator, and a sampler draws
    the order when it is asked for its first batch. `draw_order` does that at the right moment.

    Args:
        batch_sampler: The batch sampler.
        skip: Number of batches that are left out.
    """

    def __init__(self, batch_sampler: Any, skip: int) -> None:
        self.batch_sampler = batch_sampler
        self.skip = skip
        self._indices: Iterator[Any] = iter(())

    def draw_order(self) -> None:
        """Draw the order, and leave out the first batches."""
        for _ in range(self.skip):
            next(self._indices, None)
        if not self.skip:
            self._indices = with_first_fetched(self._indices)

    def __iter__(self) -> Iterator[Any]:
        self._indices = iter(self.batch_sampler)
        return self._rest()

    def _rest(self) -> Iterator[Any]:
        yield from self._indices

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip)


class FirstDrawn(Sampler[Any]):
    """A batch sampler of the user, of which every pass has the batches of the first, also in a resumed run.

    It is not held as `sampler`: that receives the number of each epoch, and its generator is restored.

    Args:
        sampler: The batch sampler of the user.
        seed: The same number in all processes.

    Attributes:
        generator: Its generator as it was before the first pass, if it has one. A resumed run restores it.
    """

    def __init__(self, sampler: Any, seed: int) -> None:
        self._drawn_from = DrawnAlike(sampler, seed)
        self._own: Any = getattr(sampler, "generator", None)
        self.generator: torch.Generator | None = None
        if isinstance(self._own, torch.Generator):
            self.generator = self._own.clone_state()
        if hasattr(sampler, "planned_batches"):
            self.planned_batches = sampler.planned_batches
        self._drawing: Iterator[Any] | None = None
        self._batches: list[Any] = []

    def __len__(self) -> int:
        return len(self._drawn_from)

    def __iter__(self) -> Iterator[Any]:
        if self._drawing is None:
            self._drawn_from.set_epoch(0)
            if self.generator is not None:
                self._own.set_state(self.generator.get_state())
            self._drawing = iter(self._drawn_from)
        # Not all at once: some samplers have no end.
        for index in itertools.count():
            if index == len(self._batches):
                drawn = list(itertools.islice(self._drawing, 1))
                if not drawn:
                    return
                self._batches += drawn
            yield self._batches[index]


class Recorder:
    """A batch sampler that records the batches of another.

    Args:
        batch_sampler: The other one.
        indices: List that receives the indices of each batch that is drawn; a new pass empties it.
    """

    def __init__(self, batch_sampler: Any, indices: list[list[int]]) -> None:
        self.batch_sampler = batch_sampler
        self.indices = indices

    def __iter__(self) -> Iterator[Any]:
        # Workers read ahead, so the list may be longer than the number of batches delivered.
        self.indices.clear()
        for batch in self.batch_sampler:
            self.indices.append(list(batch))
            yield batch

    def __len__(self) -> int:
        return len(self.batch_sampler)
