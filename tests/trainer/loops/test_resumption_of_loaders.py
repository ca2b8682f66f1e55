"""A resumed run reads its loaders on as the killed one would have, with workers that live longer than an epoch, too."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from tests.support.resumption import assert_resumes
from tests.support.trainer_runs import Small, loader, trainer

pytestmark = pytest.mark.filterwarnings("ignore:The val loader shuffles", "ignore:.*`overfit_batches`")

SAMPLES = 12


class SeedsOfWorkers(Dataset[tuple[Tensor]]):
    """Samples of an index, and the seed of the worker that has read it."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor]:
        info = get_worker_info()
        assert info is not None
        return (torch.tensor([float(index), info.seed % 1000]),)


class Reads(Small):
    """Notes the samples it sees, in training and in validation; its loss depends on all of them, and on noise."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batches = batch if isinstance(batch[0], list) else [batch]
        self.seen.append([features.tolist() for (features,) in batches])
        return sum(self.loss(features / 1000 + torch.randn(2)) for (features,) in batches)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if not self.trainer.sanity_checking:
            self.seen.append(["val", batch[0].tolist()])


def staying(**options: Any) -> DataLoader[Any]:
    """A loader whose workers live as long as the run."""
    return DataLoader(SeedsOfWorkers(), batch_size=4, persistent_workers=True, **{"num_workers": 1, **options})


def two_staying() -> list[Any]:
    return [staying(shuffle=True), staying()]


CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any] | None, dict[str, Any]]] = {
    "two workers, own generator": (
        lambda: staying(shuffle=True, num_workers=2, generator=torch.Generator().manual_seed(4)),
        None,
        {},
    ),
    "read together": (lambda: [staying(shuffle=True), loader(2, 6, shuffle=True)], None, {}),
    "validation": (lambda: loader(3, 4, shuffle=True), two_staying, {}),
    "seldom validated": (
        lambda: loader(3, 4, shuffle=True),
        two_staying,
        {"check_val_every_n_epoch": 2, "num_sanity_val_steps": 0},
    ),
    "requested again": (lambda: staying(shuffle=True), None, {"reload_dataloaders_every_n_epochs": 2}),
}


@pytest.mark.thorough
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", CASES)
def test_persistent_workers_read_the_samples_of_the_undisturbed_run(name: str, tmp_path: Path) -> None:
    """In its order, with the seeds of its workers, from whichever hook the run continues."""
    train, val, options = CASES[name]

    def run(callbacks: list[Any], path: Path | None) -> Any:
        module: Any = Reads()
        module.train_dataloader, limit = train, {"limit_val_batches": 0}
        if val is not None:
            module.val_dataloader, limit = val, {}
        trainer(max_epochs=3, callbacks=callbacks, **limit, **options).fit(module, ckpt_path=path)
        return module.seen, module

    hooks = ("on_train_epoch_start", "on_train_batch_end", "on_validation_batch_end", "on_train_epoch_end")
    assert_resumes(run, tmp_path, hooks, first_epoch=0)


class Shuffling:
    """Batches without a length, in an order that each pass draws from Python's numbers."""

    def __iter__(self) -> Iterator[list[Tensor]]:
        order = random.sample(range(3), 3)
        return iter([[torch.tensor([[float(index), 1.0]])] for index in order])


SHORTER: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: loader(2, 2, shuffle=True),
    "worker that stays": lambda: staying(shuffle=True, drop_last=True),
    "own generator": lambda: loader(2, 2, shuffle=True, generator=torch.Generator().manual_seed(4)),
    "iterable": Shuffling,
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", SHORTER)
def test_a_shorter_loader_begins_anew_in_the_order_of_the_undisturbed_run(name: str, tmp_path: Path) -> None:
    """It does so within an epoch, after steps that have drawn numbers as well."""

    class DrawsInSteps(Reads):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            random.random()
            return super().training_step(batch, batch_idx)

    def run(callbacks: list[Any], path: Path | None) -> Any:
        module = DrawsInSteps()
        run = trainer(max_epochs=2, callbacks=callbacks, limit_val_batches=0)
        run.fit(module, [loader(8, 2, shuffle=True), SHORTER[name]()], ckpt_path=path)
        return module.seen[-1], module

    assert_resumes(run, tmp_path, ["on_train_batch_end"])


def test_a_sampler_with_set_epoch_continues_with_the_order_of_its_epoch(tmp_path: Path) -> None:
    def run(callbacks: list[Any], path: Path | None) -> Any:
        module, data = Reads(), torch.arange(6.0)[:, None]
        sampler: Any = DistributedSampler(TensorDataset(data), num_replicas=1, rank=0, shuffle=True)
        run = trainer(max_epochs=2, callbacks=callbacks)
        run.fit(module, DataLoader(TensorDataset(data), batch_size=2, sampler=sampler), ckpt_path=path)
        return module.seen, module

    assert_resumes(run, tmp_path, ["on_train_batch_end"], calls=[4])
