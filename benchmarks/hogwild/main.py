"""Accuracy and throughput of processes that step shared parameters; see README.md."""

import argparse
import gzip
import logging
import os
import time
import warnings
from pathlib import Path
from statistics import mean
from typing import Any

import lightning as L
import numpy
import torch
from lightning.pytorch import seed_everything
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from equipoise import HogwildStrategy, Trainer

LEAST_THROUGHPUT = 1.4
"""The bound: samples a second of two processes against one, on two free cores."""

DATA = Path(os.environ.get("EQUIPOISE_TEST_DATA", "")) / "mnist"


def images(kind: str) -> TensorDataset:
    """Return the images of MNIST and their labels.

    Args:
        kind: "train" or "t10k".
    """
    features, labels = (_array(f"{kind}-{name}") for name in ("images", "labels"))
    rows = torch.from_numpy(features.reshape(len(features), -1).copy()).float() / 255
    return TensorDataset(rows, torch.from_numpy(labels.copy()).long())


def _array(name: str) -> Any:
    """Return the array in the file of MNIST whose name begins so."""
    (path,) = sorted(DATA.rglob(f"{name}*"))[:1]
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    dimensions = content[3]
    shape = numpy.frombuffer(content, ">u4", dimensions, offset=4)
    return numpy.frombuffer(content, numpy.uint8, offset=4 + 4 * dimensions).reshape(shape)


class Classifier(L.LightningModule):
    """A perceptron of two layers with momentum. It logs the time of an epoch's batches, in each process."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))

    def on_train_epoch_start(self) -> None:
        torch.set_num_threads(1)
        self.begin = time.process_time(), time.perf_counter()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_epoch_end(self) -> None:
        processor, wall = self.begin
        self.log("processor", time.process_time() - processor, reduce_fx="max", sync_dist=True)
        self.log("wall", time.perf_counter() - wall, reduce_fx="max", sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


WAYS: dict[str, Any] = {
    "one process": lambda: "single_device",
    "hogwild, 2 processes": lambda: HogwildStrategy(processes=2),
    "hogwild, 2 processes, shared state": lambda: HogwildStrategy(processes=2, optimizer_state="shared"),
}


def run(strategy: Any, seed: int) -> tuple[float, float, float]:
    """Return the accuracy after an epoch, and the processor and wall time of its slowest process in seconds."""
    seed_everything(seed, verbose=False)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(strategy=strategy, accelerator="cpu", max_epochs=1, enable_model_summary=False, **quiet)
    module = Classifier()
    trainer.fit(module, DataLoader(images("train"), batch_size=32, shuffle=True))
    processor, wall = (float(trainer.callback_metrics[name]) for name in ("processor", "wall"))
    test = Trainer(accelerator="cpu", enable_model_summary=False, **quiet)
    (metrics,) = test.test(module, DataLoader(images("t10k"), batch_size=500), verbose=False)
    return metrics["accuracy"], processor, wall


def main() -> int:
    """Print the table, and return 1 if `--check` is given and a bound is not kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds; default: 5")
    parser.add_argument("--check", action="store_true", help="fail if a bound is not kept")
    arguments = parser.parse_args()
    if not DATA.is_dir():
        print("EQUIPOISE_TEST_DATA names no folder with mnist/ in it: nothing is measured.")
        return 0
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")

    results: dict[str, list[tuple[float, float, float]]] = {name: [] for name in WAYS}
    for seed in range(arguments.seeds):
        for name, make in WAYS.items():
            results[name].append(run(make(), seed))
    table = Table(title=f"MNIST, one epoch, {arguments.seeds} seeds; seconds of the slowest process")
    for column in ("", "accuracy, each seed", "mean", "processor time", "times", "wall time", "times"):
        table.add_column(column)
    _, base_processor, base_wall = map(mean, zip(*results["one process"], strict=True))
    for name, runs in results.items():
        accuracies, processors, walls = zip(*runs, strict=True)
        each = " ".join(f"{value:.4f}" for value in accuracies)
        ratios = f"{base_processor / mean(processors):.2f}", f"{base_wall / mean(walls):.2f}"
        table.add_row(
            name, each, f"{mean(accuracies):.4f}", f"{mean(processors):.2f}", ratios[0], f"{mean(walls):.2f}", ratios[1]
        )
    Console(width=150).print(table)

    alone = [accuracy for accuracy, _, _ in results["one process"]]
    together = results["hogwild, 2 processes"]
    is_accurate = min(alone) <= mean(accuracy for accuracy, _, _ in together) <= max(alone)
    is_quick = base_wall / mean(wall for _, _, wall in together) >= LEAST_THROUGHPUT
    return int(arguments.check and not (is_accurate and is_quick))


if __name__ == "__main__":
    raise SystemExit(main())
