"""Cost of callbacks that watch a run: OOMRecovery, MemoryLogger or StepTimes beside Equipoise without them.

python benchmarks/overhead/armed.py            the table, some minutes
python benchmarks/overhead/armed.py --check    exits with 1 if a bound is broken
"""

import argparse
import logging
import math
import sys
import warnings
from collections.abc import Callable
from functools import partial

import torch
from rich.console import Console
from timing import BY_HAND, NOISE, Entry, Row, measure
from torch import nn
from workload import CLASSES, FEATURES, Classifier, Size, TimedBatches, loader_of, make_batches, network

from equipoise import Callback, MemoryLogger, OOMRecovery, StepTimes, Trainer

UNARMED = "unarmed"
LOADS: dict[str, Callable[[], Callback]] = {
    "OOMRecovery": OOMRecovery,
    "MemoryLogger": MemoryLogger,
    "StepTimes": StepTimes,
}


def with_buffers() -> nn.Module:
    """(32, 32) → (32, 10), with the 162 buffers of 54 BatchNorm layers: about as many as a ResNet-50 has."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(54):
        layers += [nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES)]
    return nn.Sequential(*layers, nn.Linear(FEATURES, CLASSES))


NETWORKS: dict[str, Callable[[], nn.Module]] = {"32-64-64-10": network, "162 buffers": with_buffers}
MICROSECONDS = {
    ("32-64-64-10", "OOMRecovery"): 15.0,
    ("162 buffers", "OOMRecovery"): 80.0,
    ("32-64-64-10", "MemoryLogger"): 20.0,
    ("32-64-64-10", "StepTimes"): 3.0,
}
"""The most that a callback may add to a step."""


def fit(make: Callable[[], nn.Module], load: str, data: TimedBatches) -> nn.Module:
    """Trains a network."""
    module = Classifier()
    module.network = make()  # type: ignore[assignment]
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        callbacks=[LOADS[load]()] if load in LOADS else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader_of(data))
    return module.network


def entries() -> list[Entry]:
    """For each network the unarmed trainer, which stands in for the loop by hand, and once more for the noise."""
    found = []
    for name, make in NETWORKS.items():
        found += [Entry(name, way, UNARMED, partial(fit, make, UNARMED)) for way in (BY_HAND, NOISE)]
        loads = [load for load in LOADS if (name, load) in MICROSECONDS]
        found += [Entry(name, load, load, partial(fit, make, load)) for load in loads]
    return found


def lines(rows: list[Row]) -> list[list[str]]:
    """The table, titles first."""
    table = [["network", "", "per step", "over unarmed", "quartiles", "bound", "rounds"]]
    for row in sorted(rows, key=lambda row: list(NETWORKS).index(row.group)):
        name = {BY_HAND: UNARMED, NOISE: f"{UNARMED}, again"}.get(row.name, row.name)
        over = ["", ""] if row.name == BY_HAND else [f"{row.over:+.1f}", f"{row.low:+.1f} … {row.high:+.1f}"]
        limit = MICROSECONDS.get((row.group, row.name))
        bound = "" if limit is None else f"{limit:.0f}"
        table.append([row.group, name, f"{row.time:.1f}", *over, bound, str(row.rounds)])
    return table


def main(command: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="shuffled rounds (default: 20)")
    parser.add_argument("--steps", type=int, default=500, help="timed steps of each run (default: 500)")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound is broken")
    options, console = parser.parse_args(command), Console()
    console.width = max(console.width, 100)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    size = Size(options.steps, 50)
    rows = measure(
        entries(),
        make_batches(),
        size=size,
        rounds=options.rounds,
        seed=0,
        report=lambda done: print(f"\rround {done} of {options.rounds}", end="", file=sys.stderr, flush=True),
    )
    print(file=sys.stderr)
    titles, *table = lines(rows)
    for line in (titles, ["---"] * 2 + ["---:"] * (len(titles) - 2), *table):
        console.print(f"| {' | '.join(line)} |", markup=False, highlight=False)
    broken = [row for row in rows if row.over > MICROSECONDS.get((row.group, row.name), math.inf)]
    for row in broken:
        limit = MICROSECONDS[row.group, row.name]
        console.print(f"Bound broken: {row.name}, {row.group}: {row.over:.1f} µs, not {limit:.0f}.")
    return int(options.check and bool(broken))


if __name__ == "__main__":
    sys.exit(main())
