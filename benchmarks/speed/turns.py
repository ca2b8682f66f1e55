"""Two loops that take turns, step by step, and the processor time of each step."""

from collections.abc import Callable, Iterator, Sequence
from time import process_time
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from workload import LEARNING_RATE, Batch, make_batches, network

__all__ = ["WARM_UP", "Batches", "Turns"]

WARM_UP = 100
QUANTILE = 0.05
"""The share of steps that are quicker than the one that counts. Other work makes steps slower, and none quicker."""

_kept: list[nn.Module] = []


class Batches(Dataset[Batch]):
    """Batches in memory.

    The trainer compares the plain attributes of a data set at the end of each epoch, so there are few.

    Args:
        fetch: Returns a batch.
        length: Number of batches of an epoch.
    """

    def __init__(self, fetch: Callable[[int], Batch], length: int) -> None:
        self.fetch, self.length = fetch, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Batch:
        return self.fetch(index)


class Turns:
    """The hand-written loop takes a step whenever the loop that is measured fetches a batch.

    So both loops meet the same machine, however its speed drifts, and each finds the caches as the other has left them.

    Args:
        steps: Number of steps of each loop.
        epoch: Number of batches of an epoch. Default: None, all steps are in one.
        is_distributed: True if torch's wrapper for DDP is around the network of the hand-written loop. Default: False.
    """

    def __init__(
        self,
        steps: int,
        *,
        epoch: int | None = None,
        is_distributed: bool = False,
    ) -> None:
        self.steps, self.epoch, self.is_distributed = steps, epoch or WARM_UP + steps, is_distributed
        self.batches = make_batches()
        self.times: list[float] = []
        self.times_by_hand: list[float] = []
        self.loop: Iterator[None] | None = None
        self.begun = float("nan")

    @property
    def data(self) -> Batches:
        """The data set of the loop that is measured."""
        return Batches(self.fetch, self.epoch)

    @property
    def epochs(self) -> int:
        return (WARM_UP + self.steps) // self.epoch

    def fetch(self, index: int) -> Batch:
        """Take a turn, and return a batch."""
        self.take()
        return self.batch(index)

    def take(self) -> None:
        """End a step of the loop that is measured, and take one of the hand-written loop."""
        ended = process_time()
        self.times.append(ended - self.begun)
        if self.loop is None:
            self.loop = self.train_by_hand()
        next(self.loop)
        self.begun = process_time()
        self.times_by_hand.append(self.begun - ended)

    def batch(self, index: int) -> Batch:
        return self.batches[index % len(self.batches)]

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the hand-written loop: each process has its own."""
        return {**self.__dict__, "loop": None}

    def train_by_hand(self) -> Iterator[None]:
        """Take a step of the loop that people write by hand."""
        model: nn.Module = network()
        if self.is_distributed:
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
            # torch's wrapper must not go before the process group: that may block for ever.
            _kept.append(model)
        optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
        loader = DataLoader(Batches(self.batch, self.epoch), batch_size=None)
        while True:
            for features, labels in loader:
                loss = F.cross_entropy(model(features), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                yield

    def ratio(self, period: int = 1) -> float:
        """Return the time of a quick step over that of the hand-written loop.

        Args:
            period: Number of steps after which work returns that not every step has. Default: 1.
        """
        return _quick(self.times[WARM_UP:], period) / _quick(self.times_by_hand[WARM_UP:], period)


def _quick(times: Sequence[float], period: int) -> float:
    """Return the mean over the places of a period of the quick steps at that place."""
    places = [sorted(times[place::period]) for place in range(period)]
    return sum(steps[int(QUANTILE * len(steps))] for steps in places) / period
