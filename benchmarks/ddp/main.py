"""Cost of a step of DDP through the trainer: both engines beside a hand-written loop with torch's wrapper.

python benchmarks/ddp/main.py             the table, some minutes
python benchmarks/ddp/main.py --check     exits with 1 if a bound is broken
"""

import argparse
import logging
import os
import platform
import random
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from equipoise import DDPStrategy, Trainer
from equipoise.parallel.communication.process_group import StoreServer, joined
from equipoise.parallel.communication.rank import Rank
from equipoise.parallel.workers.launch import launch

MOST, MOST_NATIVE, MOST_SECONDS = 1.05, 1.05, 1.0
PROCESSES, BATCH = 2, 64
# Processes keep what they have freed, so that page faults, which differ from start to start, do not blur the figures.
KEEPING = {f"MALLOC_{name}_": str(10**9) for name in ("MMAP_THRESHOLD", "TRIM_THRESHOLD")}
KEPT: list[nn.Module] = []


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((1, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.ReLU()]
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


NETWORKS: dict[str, Callable[[], nn.Module]] = {"MLP": mlp, "convolutions": convolutions}


class Clock:
    """Seconds per step between two steps."""

    def __init__(self, warm_up: int, steps: int) -> None:
        self.warm_up, self.last, self.step = warm_up, warm_up + steps, 0
        self.start = self.seconds = 0.0

    def tick(self) -> None:
        if self.step == self.warm_up:
            self.start = time.perf_counter()
        if self.step == self.last:
            self.seconds = (time.perf_counter() - self.start) / (self.last - self.warm_up)
        self.step += 1


class Module(L.LightningModule):
    def __init__(self, network: Callable[[], nn.Module], clock: Clock) -> None:
        super().__init__()
        self.net, self.clock = network(), clock

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.clock.tick()
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def data(steps: int) -> TensorDataset:
    count = steps * BATCH * PROCESSES
    return TensorDataset(torch.randn(count, 64), torch.randint(10, (count,)))


def by_hand(network: Callable[[], nn.Module], clock: Clock) -> float:
    """The loop of torch's tutorial."""
    store = StoreServer()
    return launch(partial(_by_hand, network, clock, data(clock.last + 1), store.port), PROCESSES)


def _by_hand(network: Callable[[], nn.Module], clock: Clock, dataset: Any, port: int, rank: int) -> float:
    place = Rank(rank, rank, 0, PROCESSES, PROCESSES)
    with joined(place, torch.device("cpu"), timeout=timedelta(seconds=60), port=port):
        torch.manual_seed(0)
        module = DistributedDataParallel(network(), gradient_as_bucket_view=True)
        KEPT.append(module)  # torch's wrapper must not go after its process group: that may block for ever
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        sampler: Any = DistributedSampler(dataset)
        sampler.set_epoch(0)
        for features, labels in DataLoader(dataset, batch_size=BATCH, sampler=sampler):
            clock.tick()
            loss = nn.functional.cross_entropy(module(features), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return clock.seconds


def by_trainer(engine: Any, network: Callable[[], nn.Module], clock: Clock) -> float:
    """The same through the trainer."""
    module = Module(network, clock)
    trainer = Trainer(
        strategy=DDPStrategy(engine=engine),
        devices=["cpu"] * PROCESSES,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data(clock.last + 1), batch_size=BATCH, shuffle=True))
    return module.clock.seconds


def second_start() -> float:
    """Seconds of a `fit` of a single step, when the server is there."""
    start = time.perf_counter()
    by_trainer("native", mlp, Clock(0, 1))
    return time.perf_counter() - start


def main(command: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="timed steps of each run (default: 100)")
    parser.add_argument("--rounds", type=int, default=25, help="shuffled rounds (default: 25)")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound is broken")
    options = parser.parse_args(command)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    os.environ.update(KEEPING)

    ways: dict[str, Callable[..., float]] = {
        "by hand": by_hand,
        "torch": partial(by_trainer, "torch"),
        "native": partial(by_trainer, "native"),
    }
    table, broken = Table("network", "by hand, ms", "torch", "native", "torch / by hand", "native / torch"), []
    rows = []
    by_hand(mlp, Clock(1, 1))  # the server is started
    for name, network in NETWORKS.items():
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(options.rounds):
            for way in random.sample(list(ways), len(ways)):
                times[way].append(ways[way](network, Clock(20, options.steps)) * 1e3)
        first, second = (
            median(a / b for a, b in zip(times[one], times[other], strict=True))
            for one, other in (("torch", "by hand"), ("native", "torch"))
        )
        rows.append([name, *(f"{median(times[way]):.2f}" for way in ways), f"{first:.3f}", f"{second:.3f}"])
        table.add_row(*rows[-1])
        if first > MOST or first * second > MOST:
            broken.append(f"{name}: {first:.3f} and {first * second:.3f} times the loop by hand, not {MOST}")
        if second > MOST_NATIVE:
            broken.append(f"{name}: the native engine takes {second:.3f} times torch's, not {MOST_NATIVE}")
    seconds = median(second_start() for _ in range(5))
    if seconds > MOST_SECONDS:
        broken.append(f"a second fit starts and ends in {seconds:.2f} s, not {MOST_SECONDS}")
    console = Console()
    console.print(table)
    console.print(f"A second fit, of two steps, takes {seconds:.2f} s.")
    console.print(f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}, no GPU")
    if options.markdown:
        titles = [str(column.header) for column in table.columns]
        lines = [titles, ["---"] * len(titles), *rows]
        text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
        options.markdown.write_text(f"{text}\nA second fit, of two steps, takes {seconds:.2f} s.\n")
    for sentence in broken:
        console.print(f"Bound broken: {sentence}.")
    if not broken:
        console.print("All bounds are kept.")
    return int(bool(broken)) if options.check else 0


if __name__ == "__main__":
    sys.exit(main())
