"""Sources of which each process has another number of batches, in every stage and under every strategy of processes."""

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from equipoise import HogwildStrategy, PipelineStrategy
from equipoise.errors import StepError
from tests.support.trainer_runs import trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore:.* promised .* batches by its length",
    "ignore:The number of samples of a batch cannot be inferred",
    "ignore:Loader 0 of .* is not the same in all processes",
)


class Module(L.LightningModule):
    """Requests loaders of another length in each process."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def own_loader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(self.trainer.global_rank)
        return DataLoader(torch.rand(3 + 8 * self.trainer.global_rank, 3, generator=generator), batch_size=2)

    train_dataloader = own_loader
    val_dataloader = own_loader
    test_dataloader = own_loader
    predict_dataloader = own_loader

    def loss(self, batch: Any) -> Tensor:
        if isinstance(batch, dict):  # of combined loaders
            batch = torch.cat([part for part in batch.values() if part is not None])
        return self.net(batch).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stream(IterableDataset[Tensor]):
    """Seven samples, which it divides among the processes itself."""

    def __iter__(self) -> Iterator[Tensor]:
        rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
        for number in range(rank, 7, count):
            yield torch.full((3,), float(number))


class Wrong(Sampler[int]):
    """Draws twelve samples, and says another number."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(12))

    def __len__(self) -> int:
        return self.length


class Unequal(IterableDataset[Tensor]):
    """Nine samples of the first process, four of the second."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.rand(4 if torch.distributed.get_rank() else 9, 3))


class EveryOther(Sampler[int]):
    """Deals an order of all samples, drawn from the global generator, to the processes."""

    def __iter__(self) -> Iterator[int]:
        rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
        return iter(torch.randperm(8).tolist()[rank::count])

    def __len__(self) -> int:
        return 4


class ShuffledStream(IterableDataset[Tensor]):
    """The same as a stream, with numbers of Python's generator."""

    def __iter__(self) -> Iterator[Tensor]:
        rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
        order = random.sample(range(8), 8)
        return (torch.tensor(number) for number in order[rank::count])


class Noting(L.LightningModule):
    """Notes the samples of all processes, and a random number of each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seen: list[int] = []
        self.noise: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += self.all_gather(batch).flatten().tolist()
        self.noise += self.all_gather(torch.rand(())).tolist()
        return self.weight * batch.sum()

    configure_optimizers = Module.configure_optimizers


def run(**options: Any) -> Any:
    return trainer(**{"devices": 2, "max_epochs": 2, "num_sanity_val_steps": 0, **options})


@pytest.mark.quick_cases(2)
@pytest.mark.thorough
@pytest.mark.parametrize(("strategy", "share"), [("ddp", True), ("fsdp", False), ("ddp", False)])
def test_processes_with_unequal_numbers_of_batches_take_part_to_the_end(strategy: str, share: bool) -> None:
    module = Module()
    fit = run(strategy=strategy, use_distributed_sampler=share)
    fit.fit(module)
    # The second process has 11 samples, or the half of them.
    assert fit.num_training_batches == (3 if share else 6)
    assert fit.global_step == 2 * fit.num_training_batches
    (values,) = fit.test(module, verbose=False)
    assert values == pytest.approx(fit.validate(module, verbose=False)[0])
    if not share:
        assert len(torch.cat(fit.predict(module))) == 3 + 11


def test_different_loaders_that_the_trainer_divides_are_warned_of() -> None:
    warnings.simplefilter("error")
    with pytest.raises(UserWarning, match=r"`Module.test_dataloader\(\)` is not .* lengths 3, 11\. .* only a part"):
        run(strategy="ddp").test(Module(), verbose=False)


class Counting(Module):
    """Counts the batches that the main process reads."""

    def __init__(self) -> None:
        super().__init__()
        self.read = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.read += 1
        return super().training_step(batch, batch_idx)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("limit", "read", "steps"), [(0.5, 1, 3), (0.4, 0, 2)])
def test_a_fraction_as_limit_is_that_of_each_process(limit: float, read: int, steps: int) -> None:
    module = Counting()
    fit = run(strategy="ddp", use_distributed_sampler=False, limit_train_batches=limit, limit_val_batches=0)
    fit.fit(module)
    # The processes have 2 and 6 batches.
    assert (module.read, fit.global_step) == (2 * read, 2 * steps)


@pytest.mark.thorough
@pytest.mark.parametrize("empty", [0, 1])
def test_evaluations_in_which_one_process_has_no_batch(empty: int) -> None:
    class OneEmpty(Module):
        def own_loader(self) -> DataLoader[Any]:
            count = 0 if self.trainer.global_rank == empty else 5
            return DataLoader(torch.arange(3.0 * count).reshape(count, 3), batch_size=2)

        val_dataloader = predict_dataloader = own_loader

    module = OneEmpty()
    fit = run(strategy="ddp", use_distributed_sampler=False)
    data = DataLoader(torch.arange(15.0).reshape(5, 3), batch_size=2)
    (expected,) = trainer().validate(module, data, verbose=False)
    assert fit.validate(module, verbose=False)[0] == pytest.approx(expected)
    assert torch.equal(torch.cat(fit.predict(module)), torch.cat(trainer().predict(module, data)))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("mode", "steps"), [("max_size_cycle", 6), ("max_size", 6), ("min_size", 4)])
def test_combined_loaders_end_together_in_all_processes(mode: Any, steps: int) -> None:
    loaders = {"long": DataLoader(torch.rand(11, 3), 2), "short": DataLoader(torch.rand(5, 3), 2)}
    fit = run(strategy="ddp")
    fit.fit(Module(), CombinedLoader(loaders, mode))
    assert fit.global_step == steps


class Promising(DataLoader[Any]):
    """Promises seven batches, whatever there is."""

    def __len__(self) -> int:
        return 7


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(torch.rand(12, 3), 2, sampler=Wrong(6)),
        DataLoader(torch.rand(12, 3), 2, sampler=Wrong(18)),
        DataLoader(torch.rand(12, 3), batch_sampler=BatchSampler(Wrong(18), 2, False)),
        Promising(torch.rand(12, 3), 2),
    ],
    ids=["fewer", "more", "a batch sampler", "a loader"],
)
def test_a_source_whose_length_is_another_than_what_it_draws(loader: Any) -> None:
    fit = run(strategy="ddp")
    fit.fit(Module(), loader)
    assert fit.global_step == 2 * 3


class EndsEarly(Module):
    """Ends the epoch before its sixth batch, or training after it; only the first process has one."""

    def __init__(self, *, skips: bool) -> None:
        super().__init__()
        self.skips = skips

    def train_dataloader(self) -> DataLoader[Any]:
        samples = torch.rand(4 if self.trainer.global_rank else 9, 3)
        # The one has a length, the other has none.
        return DataLoader(Unequal(), 1) if self.skips else DataLoader(samples, 1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.skips and batch_idx == 5 else None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trainer.should_stop = batch_idx == 5


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("strategy", "skips", "steps"), [("ddp", True, 10), ("fsdp", False, 6)])
def test_one_process_ends_the_epoch_or_training_for_all(strategy: str, skips: bool, steps: int) -> None:
    fit = run(strategy=strategy, use_distributed_sampler=False)
    fit.fit(EndsEarly(skips=skips))
    assert fit.global_step == steps


class Saves(L.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.save_checkpoint(Path(trainer.default_root_dir, "own.ckpt"))


@pytest.mark.thorough
@pytest.mark.parametrize("fires", [True, False])
def test_a_hook_that_saves_in_one_process_alone_says_so(fires: bool, tmp_path: Path) -> None:
    callback = Saves()
    callback.fires_without_batch = fires  # type: ignore[attr-defined]
    fit = run(strategy="ddp", callbacks=[callback], default_root_dir=tmp_path, use_distributed_sampler=False)
    if fires:
        fit.fit(EndsEarly(skips=True))
        assert torch.load(tmp_path / "own.ckpt")["global_step"] == 10
    else:
        with pytest.raises(StepError, match="fires_without_batch"):
            fit.fit(EndsEarly(skips=True))


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    "loader",
    [DataLoader(torch.arange(8), 1, sampler=EveryOther()), DataLoader(ShuffledStream(), 1, num_workers=1)],
    ids=["sampler", "stream with workers"],
)
def test_processes_draw_one_order_and_other_noise_where_a_source_deals_samples_at_random(loader: Any) -> None:
    L.seed_everything(5, verbose=False)
    module = Noting()
    run(strategy="ddp", use_distributed_sampler=False).fit(module, loader)
    first, second = module.seen[:8], module.seen[8:]
    assert sorted(first) == sorted(second) == list(range(8))
    assert first != second
    # The numbers of steps stay different.
    assert len(set(module.noise)) == 16


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hogwild", "pipeline"])
def test_streams_of_unequal_length_under_other_strategies(name: str) -> None:
    options: dict[str, Any] = {"strategy": HogwildStrategy(processes=2)}
    if name == "pipeline":
        pipeline = PipelineStrategy(engine="processes", replicas=2, micro_batches=2)
        options = {"strategy": pipeline, "devices": ["cpu"] * 4}
    fit = run(use_distributed_sampler=False, **options)
    fit.fit(Module(), DataLoader(Stream(), 1), DataLoader(Stream(), 1))
    assert fit.global_step == 2 * 4
