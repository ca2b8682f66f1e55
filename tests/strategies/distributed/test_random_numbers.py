"""Each process draws random numbers of its own in the loop, and the same ones before it."""

import json
import random
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, random_split

from tests.support.trainer_runs import trainer


class Noisy(Dataset[Tensor]):
    """Samples whose last number is random."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), random.random(), float(np.random.rand()), float(torch.rand(()))])


class Drawing(L.LightningModule):
    """Notes what each process draws, in a file of its own.

    Args:
        folder: Where the files are.
        workers: Number of workers of the loader.
        generator: Whether the loader has a generator of its own.
    """

    def __init__(self, folder: Path, workers: int = 0, *, generator: bool = False) -> None:
        super().__init__()
        self.folder, self.workers, self.has_generator = folder, workers, generator
        self.layer = nn.Linear(4, 1)
        self.dropout = nn.Dropout(0.5)

    def note(self, name: str, *values: Any) -> None:
        with open(self.folder / f"{name} {self.trainer.global_rank}", "a") as file:
            file.write(json.dumps(values) + "\n")

    def setup(self, stage: str) -> None:
        first, second = random_split(range(20), [10, 10])  # type: ignore[arg-type]
        self.note("split", sorted(first.indices), sorted(second.indices))

    def train_dataloader(self) -> Any:
        self.note("loader", torch.rand(3).tolist(), random.random())
        generator = torch.Generator().manual_seed(5) if self.has_generator else None
        return DataLoader(Noisy(), 2, num_workers=self.workers, generator=generator)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.note("noise", batch[:, 1:].flatten().tolist())
        self.note("mask", self.dropout(torch.ones(8)).tolist())
        return self.layer(batch).square().mean()

    def teardown(self, stage: str) -> None:
        with torch.random.fork_rng([]):
            self.note("next", torch.rand(3).tolist())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(folder: Path, strategy: str, devices: int, ckpt_path: Path | None = None, **options: Any) -> None:
    folder.mkdir(exist_ok=True)
    L.seed_everything(3)
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    run = trainer(
        strategy=strategy,
        devices=devices,
        max_epochs=2,
        callbacks=[saving],
        enable_checkpointing=True,
        reload_dataloaders_every_n_epochs=1,
    )
    run.fit(Drawing(folder, **options), ckpt_path=ckpt_path)


def drawn(folder: Path, name: str, rank: int) -> list[Any]:
    return [json.loads(line) for line in (folder / f"{name} {rank}").read_text().splitlines()]


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, {"workers": 1, "generator": True}], ids=str)
def test_processes_draw_other_numbers_in_the_loop_and_the_same_before_it(
    options: dict[str, Any], tmp_path: Path
) -> None:
    fit(tmp_path, "ddp", 2, **options)
    for name in ("split", "loader"):
        assert drawn(tmp_path, name, 0) == drawn(tmp_path, name, 1)
    for name in ("noise", "mask"):
        first, second = drawn(tmp_path, name, 0), drawn(tmp_path, name, 1)
        assert len(first) == len(second) == 6
        pairs = zip(first, second, strict=True)
        assert all(one != other for one, other in pairs)
    noise = [value for rank in range(2) for (row,) in drawn(tmp_path, "noise", rank) for value in row]
    assert len(set(noise)) == len(noise)


@pytest.mark.thorough
def test_the_first_process_draws_as_a_run_in_one_process(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    fit(one, "single_device", 1)
    fit(two, "ddp", 2)
    # What follows the run goes on from it.
    assert [[torch.rand(3).tolist()]] == drawn(two, "next", 0)
    assert drawn(two, "split", 0) == drawn(one, "split", 0)
    assert drawn(two, "mask", 0)[0] == drawn(one, "mask", 0)[0]


@pytest.mark.thorough
def test_a_resumed_run_draws_as_an_undisturbed_one(tmp_path: Path) -> None:
    """Within an epoch, and at its end."""
    whole = tmp_path / "whole"
    fit(whole, "ddp", 2)
    for step in (2, 3):
        fit(rest := tmp_path / f"{step}", "ddp", 2, whole / f"step={step}.ckpt")
        for name in ("noise", "mask"):
            assert [drawn(rest, name, rank) for rank in range(2)] == [
                drawn(whole, name, rank)[step:] for rank in range(2)
            ]


@pytest.mark.thorough
def test_further_ranks_of_a_resumed_run_draw_other_numbers(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    fit(one, "single_device", 1)
    fit(two, "ddp", 2, one / "step=3.ckpt")
    first, second = drawn(two, "mask", 0), drawn(two, "mask", 1)
    assert all(mask != other for mask, other in zip(first, second, strict=True))
