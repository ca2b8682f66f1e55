"""Time of members that train side by side, beside one after the other; see README.md."""

import argparse
import logging
import time
import warnings
from statistics import median
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from equipoise import EnsembleStrategy, Trainer

LEAST_SPEEDUP = 2.0
"""The bound: 8 members of the first size, side by side, against 8 fits one after the other."""

MEMBERS = 8
# Features, hidden units, samples of a batch.
SIZES = ((16, 32, 16), (64, 64, 32), (64, 512, 32))


class Classifier(L.LightningModule):
    """A perceptron of two layers with Adam, of ten classes."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def seconds(strategy: Any, size: tuple[int, int, int], steps: int) -> tuple[float, float]:
    """Return processor time and wall time of a fit, in seconds."""
    features, hidden, batch = size
    data = TensorDataset(torch.randn(batch * steps, features), torch.randint(10, (batch * steps,)))
    trainer = Trainer(
        strategy=strategy,
        devices=["cpu"],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Classifier(features, hidden)
    begin_processor, begin = time.process_time(), time.perf_counter()
    trainer.fit(module, DataLoader(data, batch_size=batch, shuffle=True))
    return time.process_time() - begin_processor, time.perf_counter() - begin


def one_after_the_other(size: tuple[int, int, int], steps: int) -> tuple[float, float]:
    """Return both times of a fit for each member."""
    times = [seconds("single_device", size, steps) for _ in range(MEMBERS)]
    return sum(processor for processor, _ in times), sum(wall for _, wall in times)


WAYS: dict[str, Any] = {
    "side by side": lambda: EnsembleStrategy(members=MEMBERS, mode="together"),
    "one by one": lambda: EnsembleStrategy(members=MEMBERS, mode="one_by_one"),
    "side by side, one order": lambda: EnsembleStrategy(members=MEMBERS, mode="together", own_order=False),
    "auto": lambda: EnsembleStrategy(members=MEMBERS),
}


def main() -> int:
    """Print the table, and return 1 if `--check` is given and the bound is not kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="steps of a fit; default: 300")
    parser.add_argument("--rounds", type=int, default=5, help="fits of each way, in turn; default: 5")
    parser.add_argument("--check", action="store_true", help="fail if the bound is not kept")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")

    table = Table(title=f"{MEMBERS} members, processor time of a step of all members in ms, and times quicker")
    for column in ("features, hidden, batch", "one after the other", *WAYS):
        table.add_column(column)
    seconds("single_device", SIZES[0], 20)
    kept = True
    for size in SIZES:
        times: dict[str, list[float]] = {name: [] for name in ("one after the other", *WAYS)}
        speedups: dict[str, list[float]] = {name: [] for name in WAYS}
        for _ in range(arguments.rounds):
            alone, _ = one_after_the_other(size, arguments.steps)
            times["one after the other"].append(alone)
            for name, make in WAYS.items():
                processor, _ = seconds(make(), size, arguments.steps)
                times[name].append(processor)
                speedups[name].append(alone / processor)
        per_step = {name: 1000 * min(values) / arguments.steps for name, values in times.items()}
        cells = [f"{per_step[name]:.2f} ({median(speedups[name]):.2f})" for name in WAYS]
        table.add_row(", ".join(map(str, size)), f"{per_step['one after the other']:.2f}", *cells)
        if size == SIZES[0]:
            kept = median(speedups["side by side"]) >= LEAST_SPEEDUP
    Console(width=150).print(table)
    return int(arguments.check and not kept)


if __name__ == "__main__":
    raise SystemExit(main())
