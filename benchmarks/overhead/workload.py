"""Work of every contestant: one tiny network on the same batches in memory, and the clock that times it.

The clock sits in the data set. Every loop, whoever wrote it, fetches its batches from there, so all of them are timed
between the same two events and none pays for its set-up: the processor time of this process is read when batch number
`warm_up` is fetched, and again `steps` batches later.
"""

from collections.abc import Callable, Iterator, Sequence
from time import process_time
from typing import NamedTuple

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

__all__ = [
    "Classifier",
    "LoaderOf",
    "LoggingClassifier",
    "Size",
    "TimedBatches",
    "loader_of",
    "loader_of_samples",
    "make_batches",
    "network",
]

BATCH, FEATURES, HIDDEN, CLASSES = 32, 32, 64, 10
SAMPLES_PER_BATCH = 64  # where batches are collated from samples
LEARNING_RATE = 0.01
Batch = tuple[Tensor, Tensor]


class Size(NamedTuple):
    """Length of a measurement.

    Attributes:
        steps: Batches that are timed.
        warm_up: Batches before them.
    """

    steps: int
    warm_up: int

    @property
    def batches(self) -> int:
        """All batches of a run, a multiple of four; the last timed step ends before the last batch is fetched."""
        return -(-(self.warm_up + self.steps + 1) // 4) * 4


def network() -> nn.Sequential:
    """(32, 32) → (32, 10), the same weights every time."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
    )


def make_batches(count: int = 64) -> list[Batch]:
    """Random batches: features (32, 32) and labels (32,)."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(BATCH, FEATURES, generator=generator), torch.randint(CLASSES, (BATCH,), generator=generator))
        for _ in range(count)
    ]


class TimedBatches(Dataset[Batch]):
    """Batches in memory, over and over again, with the clock.

    Args:
        batches: What to serve, in turn.
        size: How long to serve and what to time.
    """

    def __init__(self, batches: Sequence[Batch], size: Size) -> None:
        self.batches, self.size = batches, size
        self.first, self.last = size.warm_up, size.warm_up + size.steps
        self.begun = self.ended = float("nan")

    def __len__(self) -> int:
        return self.size.batches

    def __getitem__(self, index: int) -> Batch:
        self.read_clock(index)
        return self.batches[index % len(self.batches)]

    def read_clock(self, index: int) -> None:
        """Read the clock if the timed steps begin or end with this batch."""
        if index == self.first:
            self.begun = process_time()
        elif index == self.last:
            self.ended = process_time()

    @property
    def microseconds_per_step(self) -> float:
        """Processor time of one timed step."""
        return 1e6 * (self.ended - self.begun) / self.size.steps


def loader_of(dataset: TimedBatches) -> DataLoader[Batch]:
    """A loader over whole batches, in order, in this process."""
    return DataLoader(dataset, batch_size=None)


LoaderOf = Callable[[TimedBatches], DataLoader[Batch]]


class TimedOrder(Sampler[int]):
    """The order of samples, which reads the clock of batches.

    Args:
        data: The batches; their samples are in one data set, in the same order.
    """

    def __init__(self, data: TimedBatches) -> None:
        self.data = data
        draw = torch.Generator().manual_seed(2)
        order = torch.randperm(BATCH * len(data.batches), generator=draw)
        self.batches: list[list[int]] = order.view(-1, SAMPLES_PER_BATCH).tolist()

    def __len__(self) -> int:
        return SAMPLES_PER_BATCH * len(self.data)

    def __iter__(self) -> Iterator[int]:
        for index in range(len(self.data)):
            self.data.read_clock(index)
            yield from self.batches[index % len(self.batches)]


def loader_of_samples(data: TimedBatches) -> DataLoader[Batch]:
    """Return a loader that collates batches from samples in memory, in a random order, in this process."""
    features, labels = (torch.cat(tensors) for tensors in zip(*data.batches, strict=True))
    return DataLoader(TensorDataset(features, labels), SAMPLES_PER_BATCH, sampler=TimedOrder(data))


class Classifier(L.LightningModule):
    """The network as a LightningModule that logs nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        features, labels = batch
        return F.cross_entropy(self.network(features), labels)

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        features, labels = batch
        return F.cross_entropy(self.network(features), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), LEARNING_RATE)


class LoggingClassifier(Classifier):
    """Logs two values in every training step.

    Args:
        on_epoch: Whether their means over the epoch are logged too. Default: False.
    """

    def __init__(self, *, on_epoch: bool = False) -> None:
        super().__init__()
        self.on_epoch = on_epoch

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=self.on_epoch, prog_bar=True)
        self.log("again", loss, on_step=True, on_epoch=self.on_epoch)
        return loss
