"""Batches whose size no tensor tells weigh as many samples as their batch sampler has dealt."""

from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset

from equipoise import DDPStrategy
from equipoise.trainer.data.sample_counts import SampleCounts
from tests.support.equality import assert_equal
from tests.support.trainer_runs import trainer


class Sequences(Dataset[Any]):
    """Sequences of unequal lengths, the first of some shards among them alone in their batch."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(7)
        lengths = torch.randint(1, 6, (count,), generator=generator).tolist()
        self.samples = [torch.randn(length, 3, generator=generator, dtype=torch.float64) for length in lengths]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.samples[index]


class Graphs:
    """A batch that hides its tensors, as a library's own type does."""

    def __init__(self, samples: list[torch.Tensor]) -> None:
        self.samples = samples


def images(samples: list[torch.Tensor]) -> list[torch.Tensor]:
    """A list of pictures, whose first dimension is that of their colours."""
    return [torch.cat([sample.mean(0, keepdim=True)] * 3).reshape(3, 3, 1) for sample in samples]


class Mean(L.LightningModule):
    """The mean loss of a batch's samples, however they come."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if isinstance(batch, PackedSequence):
            samples = nn.utils.rnn.unpack_sequence(batch)
        elif isinstance(batch, Graphs):
            samples = batch.samples
        else:
            samples = [image.reshape(-1, 3) for image in batch]
        return torch.stack([self.net(sample.to(self.net.weight)).square().sum() for sample in samples]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fitted(strategy: Any, devices: int, loader: Any, **options: Any) -> Mean:
    torch.manual_seed(5)
    module = Mean()
    run = trainer(strategy=strategy, devices=devices, precision="64-true", max_epochs=2, **options)
    run.fit(module, loader)
    return module


def packed(samples: list[torch.Tensor]) -> PackedSequence:
    return pack_sequence(samples, enforce_sorted=False)


COLLATES: list[Callable[[Any], Any]] = [packed, Graphs, images]


class Uneven:
    """A batch sampler of the user's own: 3, 1, 4, 2 samples."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0, 1, 2], [3], [4, 5, 6, 7], [8, 9])

    def __len__(self) -> int:
        return 4


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("collate", COLLATES, ids=lambda each: each.__name__)
@pytest.mark.parametrize("shares", [None, [1, 3]])
def test_a_ragged_last_step_of_ddp_is_that_of_one_device(collate: Any, shares: Any) -> None:
    data = Sequences(13)  # the last step: 3 and 2 samples
    one = fitted("single_device", 1, DataLoader(data, batch_size=8, collate_fn=collate))
    many = fitted(DDPStrategy(shares=shares), 2, DataLoader(data, batch_size=4, collate_fn=collate))
    assert_equal(one, many, 1e-12)


@pytest.mark.parametrize(
    ("strategy", "devices", "options"),
    [("ddp", 2, {"num_workers": 1, "persistent_workers": True}), ("single_device", 1, {})],
    ids=["ddp with workers", "accumulation on one device"],
)
def test_batches_of_a_batch_sampler_without_batch_size_are_divided_and_weigh_by_their_samples(
    strategy: str, devices: int, options: dict[str, Any]
) -> None:
    data, pairs = Sequences(10), [[0, 1, 2, 3], range(4, 10)]
    one = fitted("single_device", 1, DataLoader(data, batch_sampler=pairs, collate_fn=Graphs))
    loader = DataLoader(data, batch_sampler=Uneven(), collate_fn=Graphs, **options)
    assert_equal(one, fitted(strategy, devices, loader, accumulate_grad_batches=2 // devices), 1e-12)


class Stream(IterableDataset[Any]):
    def shard(self, num_shards: int, index: int) -> "Stream":
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(Sequences(5).samples)


@pytest.mark.parametrize(
    ("strategy", "devices", "words"),
    [
        ("ddp", 2, "parts of a step in 2 processes have equal weights"),
        ("single_device", 1, "Batches are accumulated with equal weights"),
    ],
)
def test_a_stream_of_batches_without_sizes_warns(strategy: str, devices: int, words: str) -> None:
    loader = DataLoader(Stream(), batch_size=2, collate_fn=Graphs)
    with pytest.raises(UserWarning, match=f"{words}.*batch_size"):
        fitted(strategy, devices, loader, accumulate_grad_batches=2)


class Logging(Mean):
    """Logs the means of one number of each sample, whatever its batch looks like."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("train", batch["number"], on_step=False, on_epoch=True, sync_dist=True)
        self.log("tenfold", 10 * batch["number"], on_step=False, on_epoch=True, sync_dist=True, batch_size=1)
        return sum(parameter.sum() for parameter in self.parameters()) * 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", batch["number"], sync_dist=True)


def of_graphs(numbers: list[float]) -> dict[str, Any]:
    """The number of nodes in the first dimension of the first tensor."""
    nodes = torch.cat([torch.zeros(9 if number < 3 else 1, 3) for number in numbers])
    return {"nodes": nodes, "edges": torch.zeros(2, 5), "number": torch.tensor(numbers, dtype=torch.float64).mean()}


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("strategy", "devices", "workers"),
    [("single_device", 1, 1), ("ddp", 2, 1), ("virtual", 2, 0)],
)
def test_means_over_an_epoch_with_sync_dist_weigh_batches_by_the_samples_that_were_drawn(
    strategy: str, devices: int, workers: int
) -> None:
    numbers = [float(number) for number in range(7)]

    def loader() -> Any:
        options = {"num_workers": workers, "persistent_workers": workers > 0}
        return DataLoader(numbers, batch_size=2, collate_fn=of_graphs, **options)  # type: ignore[arg-type]

    run = trainer(strategy=strategy, devices=devices, max_epochs=2, num_sanity_val_steps=0)
    run.fit(Logging(), loader(), loader())
    assert run.callback_metrics["val"] == pytest.approx(3, rel=1e-12)
    if strategy != "virtual":
        assert run.callback_metrics["train"] == pytest.approx(3, rel=1e-12)
    # The user's number has the last word.
    if devices == 1:
        assert run.callback_metrics["tenfold"] == pytest.approx(10 * (0.5 + 2.5 + 4.5 + 6) / 4, rel=1e-12)


def test_batch_size_of_the_module_is_the_weight_of_graphs_in_a_mean() -> None:
    class Stating(Logging):
        def batch_size(self, batch: Any) -> int:
            return int(batch["nodes"][0, 0]) + 1

    batches = [{"nodes": torch.full((3, 1), float(more)), "number": torch.tensor(6.0 * more)} for more in (0, 1)]
    run = trainer()
    run.fit(Stating(), DataLoader(batches, batch_size=None))  # type: ignore[arg-type, var-annotated]
    assert run.callback_metrics["train"] == pytest.approx((1 * 0 + 2 * 6) / 3, rel=1e-12)


def test_a_loader_of_training_and_validation_counts_for_both() -> None:
    numbers = [float(number) for number in range(7)]
    loader = DataLoader(numbers, batch_size=3, collate_fn=of_graphs)  # type: ignore[arg-type, var-annotated]
    run = trainer(max_epochs=2, val_check_interval=1)
    run.fit(Logging(), loader, loader)
    assert run.callback_metrics["val"] == pytest.approx(3, rel=1e-12)
    assert run.callback_metrics["train"] == pytest.approx(3, rel=1e-12)


def test_a_loader_that_asks_its_batch_sampler_for_more() -> None:
    """A pass of a derived loader begins in its own `__iter__`, during which its batch sampler is another."""

    class Passes(Uneven):
        passes = 0

        def begin(self) -> None:
            self.passes += 1

    class Loader(DataLoader[Any]):
        def __iter__(self) -> Any:
            self.batch_sampler.begin()  # type: ignore[union-attr]
            return super().__iter__()

    sampler = Passes()
    counts, loader = SampleCounts(), Loader(range(10), batch_sampler=sampler)
    batches = counts.opened(loader)
    assert loader.batch_sampler is sampler
    assert len(list(batches)) == 4
    assert (sampler.passes, counts.of(2)) == (1, 4)
