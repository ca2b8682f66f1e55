"""A process is killed, the run resumes from its last checkpoint, and ends as one that nothing ever happened to."""

import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from equipoise import DDPStrategy, Trainer, WorkerError
from tests.strategies.programs import torchrun

pytestmark = pytest.mark.filterwarnings(r"ignore:`fit\(ckpt_path='last'\)`")

SAMPLES, BATCH, EPOCHS, STEPS = 25, 2, 3, 7  # of an epoch; in the last one the second process has no batch


class Samples(Dataset[Any]):
    """Numbered samples, distorted anew whenever one is read."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(11)
        self.features = torch.randn(SAMPLES, 4, dtype=torch.float64, generator=generator)
        self.labels = torch.randint(3, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.features[index] + 0.1 * torch.randn(4, dtype=torch.float64), self.labels[index], index


class Killed(L.LightningModule):
    """One process kills itself in the middle of a step, once; what was trained on goes into the checkpoint.

    Args:
        rank: Which process.
        step: The step of the run, from 0.
        marker: A file that says that it happened.
    """

    def __init__(self, rank: int, step: int, marker: Path) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 3))
        self.rank, self.step, self.marker = rank, step, marker
        self.seen: list[tuple[int, list[int]]] = []  # epochs and samples of this process
        self.seen_by_all: list[tuple[int, list[int]]] = []
        self.began_at = -1

    def on_train_start(self) -> None:
        self.began_at = self.trainer.global_step

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        now = self.global_rank, STEPS * self.current_epoch + batch_idx
        if now == (self.rank, self.step) and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        features, labels, indices = batch
        self.seen.append((self.current_epoch, indices.tolist()))
        return nn.functional.cross_entropy(self.net(features), labels)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.trainer.strategy.gather_objects(self.seen)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"][self.global_rank]

    def on_train_end(self) -> None:
        self.seen_by_all = [each for seen in self.trainer.strategy.gather_objects(self.seen) for each in seen]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def train(folder: Path, rank: int, step: int, engine: Any = "torch", accumulate: int = 1, seed: int = 5) -> Killed:
    """Trains, or resumes from the last checkpoint in a folder."""
    torch.manual_seed(seed)
    module = Killed(rank, step, folder / "marker")
    trainer = Trainer(
        strategy=DDPStrategy(engine=engine, timeout=300.0),
        devices=["cpu", "cpu"],
        max_epochs=EPOCHS,
        accumulate_grad_batches=accumulate,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=2, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        precision="64-true",
    )
    trainer.fit(module, DataLoader(Samples(), batch_size=BATCH, shuffle=True), ckpt_path="last")
    assert trainer.current_epoch == EPOCHS
    return module


def undisturbed(folder: Path, **options: Any) -> Killed:
    """The same training without a kill."""
    folder.mkdir()
    module = train(folder, 0, -1, **options)
    assert not module.marker.exists()
    return module


def assert_as_undisturbed(folder: Path, state: dict[str, Tensor], seen: list[Any], **options: Any) -> None:
    """See that a run has the weights of one that nothing happened to, with each sample once, in the same batches."""
    expected = undisturbed(folder, **options)
    assert expected.state_dict().keys() == state.keys()
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=1e-12, atol=1e-13)
    drawn = Counter((epoch, index) for epoch, indices in seen for index in indices)
    assert drawn == {(epoch, index): 1 for epoch in range(EPOCHS) for index in range(SAMPLES)}
    assert sorted(seen) == sorted(expected.seen_by_all)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("engine", "accumulate"), [("torch", 1), ("native", 2)])
def test_killed_and_started_anew(engine: Any, accumulate: int, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    draw = random.Random(seed)
    print(f"seed {seed}")
    rank, epoch, batch = draw.randrange(2), draw.randrange(1, EPOCHS), draw.randrange(1, STEPS - 1)
    options: dict[str, Any] = {"engine": engine, "accumulate": accumulate}
    with pytest.raises(WorkerError, match=f"rank {rank} of 2 was killed by SIGKILL"):
        train(tmp_path, rank, STEPS * epoch + batch, **options)
    assert (tmp_path / "last.ckpt").exists()
    resumed = train(tmp_path, rank, STEPS * epoch + batch, **options, seed=99)  # nothing depends on how it is built
    steps_before = epoch * -(-STEPS // accumulate) + batch // accumulate
    assert resumed.began_at == steps_before - steps_before % 2
    assert_as_undisturbed(tmp_path / "undisturbed", resumed.state_dict(), resumed.seen_by_all, **options)


SCRIPT = """
import sys
from pathlib import Path
import torch
from tests.strategies.ddp.test_restarts import STEPS, train

folder = Path(sys.argv[1])
module = train(folder, 1, STEPS + 3)
if module.global_rank == 0:
    result = {"state": module.state_dict(), "seen": module.seen_by_all, "began_at": module.began_at}
    torch.save(result, folder / "result.pt")
"""


@pytest.mark.slow
def test_torchrun_starts_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is killed in the middle of the second epoch, and torchrun starts both once more."""
    script, marker = tmp_path / "script.py", tmp_path / "marker"
    script.write_text(SCRIPT)
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.1"]
    assert not torchrun(monkeypatch, script, [str(tmp_path)], options)
    assert marker.exists(), "nobody was killed"
    result = torch.load(tmp_path / "result.pt", weights_only=True)
    assert result["began_at"] == STEPS + 3
    assert_as_undisturbed(tmp_path / "undisturbed", result["state"], result["seen"])
