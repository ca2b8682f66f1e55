"""Cost of replicas, and quality of measured shares; see README.md."""

import argparse
import logging
import platform
import random
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader

from equipoise import BalancedDataParallelStrategy, SimulatedDevice, Trainer
from equipoise.parallel.replicas.replicas import Replicas

LEAST_SAVING, LEAST_THROUGHPUT = 5.0, 0.9
"""The bounds: replicas that last against ones built anew, and measured shares against the best ones."""


class Deep(L.LightningModule):
    """A network of 218 modules, most of them small."""

    def __init__(self, blocks: int = 54) -> None:
        super().__init__()
        block = lambda: nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU())  # noqa: E731
        self.blocks = nn.Sequential(*(block() for _ in range(blocks)))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


# What replicas cost


def rebuilt(module: nn.Module, device: torch.device) -> nn.Module:
    """A replica as `nn.DataParallel` builds one for every batch: new shells of all modules, parameters copied."""
    parameters = {id(p): p.to(device, copy=True) for p in module.parameters()}
    buffers = {id(b): b.to(device, copy=True) for b in module.buffers()}
    shells = {id(part): part._replicate_for_data_parallel() for part in module.modules()}
    for part in module.modules():
        shell = shells[id(part)]
        for name, child in part._modules.items():
            setattr(shell, name, None if child is None else shells[id(child)])
        for name, parameter in part._parameters.items():
            if parameter is not None:
                setattr(shell, name, parameters[id(parameter)])
        for name, buffer in part._buffers.items():
            shell._buffers[name] = None if buffer is None else buffers[id(buffer)]
    replica: nn.Module = shells[id(module)]
    return replica


def replication(device: torch.device, rounds: int) -> tuple[float, float]:
    """Milliseconds for one more replica of a changed module: built anew, and brought up to date."""
    module = Deep().to(device)
    replicas = Replicas(module, [device, device])
    replicas.refresh([0, 1])

    def change() -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.0)

    times: dict[str, list[float]] = {"anew": [], "refreshed": []}
    work: dict[str, Callable[[], Any]] = {
        "anew": lambda: rebuilt(module, device),
        "refreshed": lambda: replicas.refresh([0, 1]),
    }
    for _ in range(rounds):
        for name in random.sample(list(work), len(work)):
            change()
            times[name].append(timed(work[name], device))
    return median(times["anew"]) * 1e3, median(times["refreshed"]) * 1e3


def timed(function: Callable[[], Any], device: torch.device) -> float:
    wait(device)
    start = time.perf_counter()
    function()
    wait(device)
    return time.perf_counter() - start


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Whole steps


class Clock(L.Callback):
    """Seconds per step, the first ones left out."""

    def __init__(self, device: torch.device, warm_up: int) -> None:
        self.device, self.warm_up, self.start, self.steps = device, warm_up, 0.0, 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.warm_up:
            wait(self.device)
            self.start, self.steps = time.perf_counter(), 0
        self.steps += 1

    def on_train_end(self, trainer: Any, module: Any) -> None:
        wait(self.device)
        self.seconds = (time.perf_counter() - self.start) / self.steps


class RebuildsReplicas(Deep):
    """Data parallel by hand in `training_step`, as `nn.DataParallel` does it: two replicas, one anew in every step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        first, second = batch.chunk(2)
        copied = rebuilt(self.blocks, self.device)
        one, other = first, second
        for own, copy in zip(self.blocks, copied.children(), strict=True):
            one, other = one + own(one), other + copy(other)
        return torch.cat([one, other]).square().mean()


def step_times(device: torch.device, steps: int, rounds: int) -> dict[str, float]:
    """Milliseconds per step: one device, replicas that last, replicas built anew."""
    data = DataLoader([torch.randn(64, 32) for _ in range(steps)], batch_size=None)
    runs: dict[str, tuple[type[Deep], str, int]] = {
        "one device": (Deep, "single_device", 1),
        "dp on two": (Deep, "dp", 2),
        "two, replicas anew": (RebuildsReplicas, "single_device", 1),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name in random.sample(list(runs), len(runs)):
            make, strategy, devices = runs[name]
            clock = Clock(device, warm_up=steps // 4)
            trainer = quiet_trainer(strategy, [device] * devices, callbacks=[clock])
            trainer.fit(make(), data)
            times[name].append(clock.seconds * 1e3)
    return {name: median(of) for name, of in times.items()}


def quiet_trainer(strategy: Any, devices: list[torch.device], **options: Any) -> Trainer:
    return Trainer(
        strategy=strategy,
        devices=devices,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


# Shares


@dataclass(frozen=True)
class Unequal:
    """Two simulated devices, milliseconds per part and per sample each, and the batch they share."""

    base: tuple[float, float]
    per_sample: tuple[float, float]
    batch: int

    def seconds(self, first: int) -> float:
        """A step whose first device computes so many samples, with both devices at work at the same time."""
        sizes = (first, self.batch - first)
        return (
            max(base + each * n if n else 0.0 for base, each, n in zip(self.base, self.per_sample, sizes, strict=True))
            / 1e3
        )

    def best(self) -> int:
        return min(range(self.batch + 1), key=self.seconds)


PAIRS = [
    Unequal((1.0, 1.0), (0.2, 0.6), 32),
    Unequal((0.0, 4.0), (0.3, 0.3), 48),
    Unequal((2.0, 1.0), (0.1, 0.4), 64),
]


class Small(L.LightningModule):
    """So little to compute that the simulated times are nearly all there is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def found_by_measuring(pair: Unequal) -> int:
    """The samples that `shares="auto"` gives to the first device."""
    simulated = {
        index: SimulatedDevice(seconds=pair.base[index] / 1e3, seconds_per_sample=pair.per_sample[index] / 1e3)
        for index in range(2)
    }
    strategy = BalancedDataParallelStrategy(shares="auto", simulated=simulated)
    trainer = quiet_trainer(strategy, [torch.device("cpu")] * 2)
    trainer.fit(Small(), DataLoader([torch.randn(pair.batch, 4) for _ in range(10)], batch_size=None))
    return strategy.sizes(pair.batch)[0]


# The command


def arguments(command: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of whole steps (default: 7)")
    parser.add_argument("--steps", type=int, default=120, help="steps in a round (default: 120)")
    parser.add_argument("--replications", type=int, default=200, help="replications timed (default: 200)")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound is broken")
    parser.add_argument("--markdown", type=Path, help="write the tables for the README into this file")
    return parser.parse_args(command)


def main(command: list[str] | None = None) -> int:
    options, console = arguments(command), Console(width=120)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "equipoise"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    devices = [torch.device("cpu")] + [torch.device("cuda:0")] * torch.cuda.is_available()
    tables, broken = [], []

    costs = Table("device", "replica anew", "brought up to date", "times cheaper", title="A replica of 218 modules, ms")
    steps = Table("device", "one device", "dp on two", "two, replicas anew", title="A whole step of that network, ms")
    for device in devices:
        anew, refreshed = replication(device, options.replications)
        costs.add_row(device.type, f"{anew:.2f}", f"{refreshed:.2f}", f"{anew / refreshed:.1f}")
        if anew / refreshed < LEAST_SAVING:
            broken.append(f"{device.type}: replicas are {anew / refreshed:.1f} times cheaper, not {LEAST_SAVING}")
        times = step_times(device, options.steps, options.rounds)
        steps.add_row(
            device.type, *(f"{times[name]:.2f}" for name in ("one device", "dp on two", "two, replicas anew"))
        )
    tables += [costs, steps]

    shares = Table(
        "base, ms", "per sample, ms", "batch", "even", "best", "auto", "throughput", title="Shares by measuring"
    )
    for pair in PAIRS:
        best, found = pair.best(), found_by_measuring(pair)
        ratio = pair.seconds(best) / pair.seconds(found)
        sizes = [f"{first} + {pair.batch - first}" for first in (pair.batch // 2, best, found)]
        shares.add_row(str(pair.base), str(pair.per_sample), str(pair.batch), *sizes, f"{ratio:.1%} of the best")
        if ratio < LEAST_THROUGHPUT:
            broken.append(f"shares of {pair} reach {ratio:.0%} of the best throughput, not {LEAST_THROUGHPUT:.0%}")
    tables.append(shares)

    for table in tables:
        console.print(table)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    console.print(
        f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}, 1 thread, {where}"
    )
    for sentence in broken:
        console.print(f"Bound broken: {sentence}.")
    if not broken:
        console.print("All bounds are kept.")
    if options.markdown is not None:
        options.markdown.write_text("\n".join(map(markdown, tables)))
    return int(bool(broken)) if options.check else 0


def markdown(table: Table) -> str:
    columns = [list(column.cells) for column in table.columns]
    lines = [[str(column.header) for column in table.columns], ["---"] * len(columns), *zip(*columns, strict=True)]
    return f"{table.title}:\n\n" + "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
