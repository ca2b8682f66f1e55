"""Each process draws random numbers of its own in the loop, and the same ones before it."""

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

pytestmark = pytest.mark.thorough


class Noisy(Dataset[Tensor]):
    """Samples whose last numbers are random."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), random.random(), float(np.random.rand()), float(torch.rand(()))])


class Drawing(L.LightningModule):
    """Notes what each process draws.

    Args:
        workers: Number of workers of the loader.
        generator: Whether the loader has a generator of its own.

    Attributes:
        drawn: For each process, lists of what was drawn, by name.
    """

    def __init__(self, workers: int = 0, *, generator: bool = False) -> None:
        super().__init__()
        self.workers, self.has_generator = workers, generator
        self.layer, self.dropout = nn.Linear(4, 1), nn.Dropout(0.5)
        self.own: dict[str, list[Any]] = {"split": [], "loader": [], "noise": [], "mask": []}

    def setup(self, stage: str) -> None:
        first, second = random_split(range(20), [10, 10])  # type: ignore[arg-type]
        self.own["split"].append((sorted(first.indices), sorted(second.indices)))

    def train_dataloader(self) -> Any:
        self.own["loader"].append((torch.rand(3).tolist(), random.random()))
        generator = torch.Generator().manual_seed(5) if self.has_generator else None
        return DataLoader(Noisy(), 2, num_workers=self.workers, generator=generator)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.own["noise"].append(batch[:, 1:].flatten().tolist())
        self.own["mask"].append(self.dropout(torch.ones(8)).tolist())
        return self.layer(batch).square().mean()

    def on_train_end(self) -> None:
        with torch.random.fork_rng([]):
            self.own["next"] = torch.rand(3).tolist()
        self.drawn = self.trainer.strategy.gather_objects(self.own)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(folder: Path, strategy: str, devices: int, ckpt_path: Path | None = None, **options: Any) -> Any:
    """Train two epochs of three steps, save after each step, and return what the processes have drawn."""
    L.seed_everything(3)
    run = trainer(
        strategy=strategy,
        devices=devices,
        max_epochs=2,
        callbacks=[ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)],
        enable_checkpointing=True,
        reload_dataloaders_every_n_epochs=1,
    )
    module = Drawing(**options)
    run.fit(module, ckpt_path=ckpt_path)
    return module.drawn


@pytest.mark.parametrize("options", [{}, {"workers": 1, "generator": True}], ids=str)
def test_processes_draw_other_numbers_in_the_loop_and_the_same_before_it(
    options: dict[str, Any], tmp_path: Path
) -> None:
    first, second = fit(tmp_path, "ddp", 2, **options)
    for name in ("split", "loader"):
        assert first[name]
        assert first[name] == second[name]
    for name in ("noise", "mask"):
        assert len(first[name]) == 6
        assert all(one != other for one, other in zip(first[name], second[name], strict=True))
    noise = [value for process in (first, second) for step in process["noise"] for value in step]
    assert len(set(noise)) == len(noise)


def test_the_first_process_draws_as_a_run_in_one_process(tmp_path: Path) -> None:
    (one,), (first, _) = fit(tmp_path / "one", "single_device", 1), fit(tmp_path / "two", "ddp", 2)
    assert torch.rand(3).tolist() == first["next"]  # what follows the run goes on from it
    assert first["split"] == one["split"]
    assert first["mask"][0] == one["mask"][0]


def test_a_resumed_run_draws_as_an_undisturbed_one(tmp_path: Path) -> None:
    """Within an epoch, and at its end."""
    whole = fit(tmp_path / "whole", "ddp", 2)
    for step in (2, 3):
        rest = fit(tmp_path / f"{step}", "ddp", 2, tmp_path / "whole" / f"step={step}.ckpt")
        for name in ("noise", "mask"):
            assert [process[name][step:] for process in rest] == [process[name][step:] for process in whole]


def test_further_ranks_of_a_resumed_run_draw_other_numbers(tmp_path: Path) -> None:
    fit(tmp_path / "one", "single_device", 1)
    first, second = fit(tmp_path / "two", "ddp", 2, tmp_path / "one" / "step=3.ckpt")
    assert len(first["mask"]) == len(second["mask"]) == 12  # the lists of the first run come along
    assert all(mask != other for mask, other in zip(first["mask"][3:], second["mask"][3:], strict=True))
