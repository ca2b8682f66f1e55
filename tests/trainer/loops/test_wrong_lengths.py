"""Passes end where the data ends, or at the length that a loader says: beyond it nothing is read."""

import itertools
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from equipoise import ConfigurationError
from tests.support.equality import assert_equal
from tests.support.pairs import pairwise
from tests.support.trainer_runs import Small, Validated, trainer

# Torch warns of a stream that is longer than it says.
pytestmark = pytest.mark.filterwarnings("ignore:Length of IterableDataset")

PROMISED = "promised {} batches by its length, and gave {}"


class Stream(IterableDataset[Tensor]):
    """Batches of a stream that says another number of them."""

    def __init__(self, count: int, length: int) -> None:
        self.count = count
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(5)
        for _ in range(self.count):
            yield torch.rand(2, 2, generator=generator)


def stream(count: int, length: int) -> DataLoader[Tensor]:
    return DataLoader(Stream(count, length), batch_size=None)


class Watched(Validated):
    """Counts what happens in each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []

    def on_validation_epoch_end(self) -> None:
        self.events.append(("validated", self.trainer.global_step))

    def on_train_epoch_end(self) -> None:
        self.events.append(("epoch", self.trainer.global_step, self.trainer.is_last_batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def fit(module: Watched, data: Any, folder: Path | None = None, ckpt_path: Path | None = None, **options: Any) -> Any:
    callbacks = []
    if folder is not None:
        callbacks = [ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)]
    run = trainer(max_epochs=2, callbacks=callbacks, enable_checkpointing=bool(callbacks), **options)
    run.fit(module, data, stream(1, 1), ckpt_path=ckpt_path)
    return run


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(("length", "window", "interval"), pairwise([1, 4, 6, 11], [1, 3, 4, 7], [1.0, None]))
def test_an_epoch_ends_with_the_data_or_the_length_where_the_length_is_too_large_or_too_small(
    length: int, window: int, interval: float | None, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": window}
    if interval is None:
        options |= {"val_check_interval": 5, "check_val_every_n_epoch": None}
    torch.manual_seed(0)
    right = Watched()
    read = min(length, 5)
    fit(right, stream(read, read), **options)
    torch.manual_seed(0)
    wrong = Watched()
    with pytest.warns(
        UserWarning, match=PROMISED.format(length, 5 if length > 5 else "more, which are not read")
    ) as told:
        run = fit(wrong, stream(5, length), tmp_path, **options)
    assert len([warning for warning in told if "promised" in str(warning.message)]) == 1
    assert_equal(right, wrong)
    assert run.optimizers[0].param_groups[0]["lr"] == 0.1 * 0.25
    if interval is not None:
        assert wrong.events == right.events

    # The rest behind each checkpoint.
    steps = run.global_step
    for step in range(1, steps + 1):
        torch.manual_seed(1)
        resumed = Watched()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit(resumed, stream(5, length), tmp_path / "again", tmp_path / f"step={step}.ckpt", **options)
        assert_equal(right, resumed, title=f"Resumed from step {step}")
        assert resumed.events == wrong.events[len(wrong.events) - len(resumed.events) :], step


@pytest.mark.parametrize(("limit", "count", "read"), [(3, 5, 3), (6, 5, 5), (0.5, 8, 3)])
def test_limits_hold(limit: float, count: int, read: int) -> None:
    run = trainer(max_epochs=1, limit_train_batches=limit)
    with pytest.warns(UserWarning, match="promised") if limit == 6 else nullcontext():
        run.fit(Small(), stream(count, 7))
    assert run.global_step == read


class Strict:
    """A loader whose iterator fails where it is asked for more than its length, as a strict `zip` does."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(self.count):
            yield torch.rand(2, 2)
        raise ValueError("zip() argument 2 is longer than argument 1")


class StrictLoader(DataLoader[Tensor]):
    """The same as a `DataLoader` of one's own."""

    def __iter__(self) -> Any:
        first = super().__iter__()
        return (batch for batch, _ in zip(first, itertools.cycle([0]), strict=True))


@pytest.mark.parametrize(
    "make", [Strict, lambda count: StrictLoader(torch.rand(2 * count, 2), batch_size=2)], ids=["own", "derived"]
)
@pytest.mark.parametrize("options", [{}, {"limit_train_batches": 2}, {"prefetch": False}])
def test_a_loader_is_not_asked_for_a_batch_beyond_its_length(make: Any, options: dict[str, Any]) -> None:
    module = Watched()
    run = trainer(max_epochs=2, num_sanity_val_steps=-1, **options)
    run.fit(module, make(3), make(2))
    steps = options.get("limit_train_batches", 3)
    assert [event for event in module.events if event[0] == "epoch"] == [
        ("epoch", steps, True),
        ("epoch", 2 * steps, True),
    ]
    run.validate(module, make(2), verbose=False)
    module.predict_step = lambda batch, batch_idx: batch  # type: ignore[method-assign]
    assert len(run.predict(module, make(3))) == 3


@pytest.mark.thorough
def test_processes_ask_their_loaders_for_no_batch_beyond_their_lengths(tmp_path: Path) -> None:
    """The process with fewer batches takes part in the last step without one, also where a run resumes behind it."""
    options = {"strategy": "ddp", "devices": 2, "max_epochs": 2, "use_distributed_sampler": False}
    for path in (None, tmp_path / "step=3.ckpt"):
        saves = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        run = trainer(**options, callbacks=[saves], enable_checkpointing=True)
        run.fit(Small(), datamodule=OfRank(), ckpt_path=path)
        assert run.global_step == 6


class OfRank(L.LightningDataModule):
    """Rank 0 has 2 batches, rank 1 has 3."""

    def train_dataloader(self) -> Strict:
        return Strict(2 + self.trainer.global_rank)


@pytest.mark.parametrize(("length", "read"), [(2, 2), (5, 3)])
def test_evaluations_read_what_comes(length: int, read: int) -> None:
    module = Watched()
    seen = []
    module.validation_step = lambda batch, batch_idx: seen.append(len(batch))  # type: ignore[method-assign]
    module.predict_step = lambda batch, batch_idx: batch  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match=PROMISED.format(length, "more" if length == read else read)):
        trainer().validate(module, stream(3, length), verbose=False)
    assert seen == [2] * read
    with pytest.warns(UserWarning, match="promised"):
        assert len(trainer().predict(module, stream(3, length))) == read


def test_a_loader_that_begins_no_second_pass_is_not_read_for_ever() -> None:
    class Once(Stream):
        def __iter__(self) -> Iterator[Tensor]:
            self.count, count = 0, self.count
            return iter(torch.rand(count, 2, 2))

    run = trainer(max_epochs=-1)
    with (
        pytest.warns(UserWarning, match="promised 2 batches by its length, and gave 0"),
        pytest.raises(ConfigurationError, match=r"gave no batch in this pass.*max_epochs=-1 would"),
    ):
        run.fit(Small(), DataLoader(Once(2, 2), batch_size=None))
    assert run.global_step == 2


class Changing(Dataset[Tensor]):
    """A data set with another number of batches from the second epoch on."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths
        self.epoch = 0

    def __len__(self) -> int:
        return self.lengths[self.epoch]

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((2, 2), float(index))


class NextEpoch(Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.train_dataloader.dataset.epoch = trainer.current_epoch


@pytest.mark.parametrize(("second", "steps"), [(2, 6), (7, 11)])
def test_a_data_set_may_grow_or_shrink_between_epochs(second: int, steps: int) -> None:
    module = Watched()
    run = trainer(max_epochs=2, callbacks=[NextEpoch()], num_sanity_val_steps=0)
    run.fit(module, DataLoader(Changing(4, second), batch_size=None), stream(1, 1))
    assert module.events == [("validated", 4), ("epoch", 4, True), ("validated", steps), ("epoch", steps, True)]
    assert run.optimizers[0].param_groups[0]["lr"] == 0.1 * 0.25


class Stopping(Changing):
    """Raises StopIteration for its third batch."""

    def __getitem__(self, index: int) -> Tensor:
        if index == 2:
            raise StopIteration
        return super().__getitem__(index)


def test_a_stop_iteration_of_a_data_set_is_reported() -> None:
    module = Watched()
    run = trainer(max_epochs=1, accumulate_grad_batches=3, num_sanity_val_steps=0)
    with pytest.warns(UserWarning, match=r"promised 4 batches by its length, and gave 2 in process 0. A StopIteration"):
        run.fit(module, DataLoader(Stopping(4), batch_size=None), stream(1, 1))
    assert module.events == [("validated", 1), ("epoch", 1, True)]
    module.validation_step = lambda batch, batch_idx: None  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="val loader that was passed promised 4 .* gave 2 in process 0"):
        run.validate(module, DataLoader(Stopping(4), batch_size=None), verbose=False)
