"""Time of a step with and without checkpoints of a module in shards; see README.md."""

import argparse
import logging
import shutil
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from equipoise import Callback, FSDPStrategy, Trainer

MOST_IN_BACKGROUND = 1.10
"""The bound: the mean time of a step with checkpoints in the background, against one without checkpoints."""

PROCESSES = 2
WIDTH = 512
BATCH = 64
"""Samples of a step in each process."""

WARM_UP = 5
"""Steps before the clock starts: memory is allocated, and Adam's state exists."""

WAYS: dict[str, Any] = {
    "no checkpoints": None,
    "full": {},
    "sharded": {"checkpoints": "sharded"},
    "sharded, in the background": {"checkpoints": "sharded", "save_in_background": True},
}


class Residual(nn.Module):
    """Two layers and a shortcut around them.

    Args:
        width: Number of features.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.relu(self.up(hidden)))


class Network(L.LightningModule):
    """Four residual blocks, 8.4 million parameters: with Adam's state, 100 MB in float32.

    Args:
        width: Number of features of a sample.
    """

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Residual(width) for _ in range(4)])

    def on_fit_start(self) -> None:
        torch.set_num_threads(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.blocks(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-4)


class Clock(Callback):
    """Saves at the beginning of each interval of steps, and measures the mean time of a step over all of them.

    Args:
        interval: Number of steps of an interval.
        intervals: Number of intervals.
        path: The checkpoint, which is written again and again. None: nothing is saved.
    """

    def __init__(self, interval: int, intervals: int, path: Path | None) -> None:
        self.interval = interval
        self.steps = interval * intervals
        self.path = path
        self.count = 0
        self.start = 0.0
        self.seconds = 0.0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save, or stop the clock."""
        done = self.count - WARM_UP
        self.count += 1
        if done == 0:
            self.start = time.perf_counter()
        if done == self.steps:
            # The last checkpoint counts as a whole.
            folders = trainer.strategy.portable.folders
            if folders is not None:
                folders.finish()
            self.seconds = (time.perf_counter() - self.start) / self.steps
        elif done >= 0 and done % self.interval == 0 and self.path is not None:
            trainer.save_checkpoint(self.path)


def loader(steps: int, width: int = WIDTH) -> DataLoader[Any]:
    """Return the batches of a process for some steps.

    Args:
        steps: Number of steps.
        width: Number of features of a sample.
    """
    samples = torch.rand(1, width).expand(steps * BATCH * PROCESSES, width)
    return DataLoader(TensorDataset(samples), batch_size=BATCH)


def time_of_step(way: str, interval: int, intervals: int, folder: Path, width: int = WIDTH) -> tuple[float, int]:
    """Return the mean time of a step in seconds, and the size of the checkpoint in bytes.

    Args:
        way: One of `WAYS`.
        interval: Number of steps from one checkpoint to the next.
        intervals: Number of intervals.
        folder: Where checkpoints are written.
        width: Number of features of the network.
    """
    options = WAYS[way]
    path = None if options is None else folder / "last.ckpt"
    clock = Clock(interval, intervals, path)
    trainer = Trainer(
        strategy=FSDPStrategy(**options or {}),
        accelerator="cpu",
        devices=PROCESSES,
        max_epochs=1,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Network(width), loader(WARM_UP + clock.steps + 1, width))
    size = 0
    if path is not None:
        files = [path, *path.rglob("*")]
        size = sum(file.stat().st_size for file in files if file.is_file())
        _remove(path)
    return clock.seconds, size


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def main(arguments: list[str] | None = None) -> int:
    """Print the table, and return 1 if `--check` is given and the bound is not kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each way; default: 3")
    parser.add_argument("--interval", type=int, default=25, help="steps from one checkpoint to the next; default: 25")
    parser.add_argument("--intervals", type=int, default=4, help="checkpoints of a run; default: 4")
    parser.add_argument("--width", type=int, default=WIDTH, help=f"features of the network; default: {WIDTH}")
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; default: a temporary folder")
    parser.add_argument("--check", action="store_true", help="fail if the bound is not kept")
    options = parser.parse_args(arguments)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")

    # 1. Measure. The ways take turns, since the machine may change in the course of the rounds.
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    sizes = dict.fromkeys(WAYS, 0)
    folder = Path(tempfile.mkdtemp(prefix="equipoise-", dir=options.folder))
    try:
        for _ in range(options.rounds):
            for way in WAYS:
                seconds, size = time_of_step(way, options.interval, options.intervals, folder, options.width)
                times[way].append(seconds)
                sizes[way] = size
    finally:
        shutil.rmtree(folder)

    # 2. Ratios within a round, and their median.
    ratios = {}
    for way in WAYS:
        pairs = zip(times[way], times["no checkpoints"], strict=True)
        ratios[way] = median(seconds / base for seconds, base in pairs)
    table = Table(title=f"A checkpoint every {options.interval} steps; medians of {options.rounds} rounds")
    for column in ("checkpoints", "size, MB", "a step, ms", "times", "a checkpoint costs, ms"):
        table.add_column(column)
    for way in WAYS:
        step = median(times[way])
        cost = (step - median(times["no checkpoints"])) * options.interval
        table.add_row(way, f"{sizes[way] / 1e6:.0f}", f"{step * 1e3:.1f}", f"{ratios[way]:.3f}", f"{cost * 1e3:.0f}")
    Console(width=120).print(table)
    return int(options.check and ratios["sharded, in the background"] > MOST_IN_BACKGROUND)


if __name__ == "__main__":
    raise SystemExit(main())
