"""Time of compiled steps beside an eager loop written by hand, for networks of several kinds.

python benchmarks/overhead/compiled.py            the table, a quarter of an hour
python benchmarks/overhead/compiled.py --check    exits with 1 if a bound is broken, with 2 without a verdict
"""

import argparse
import logging
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from by_hand import train
from frameworks import Contestant, quiet_trainer
from rich.console import Console
from timing import BY_HAND, NOISE, Entry, Row, measure
from torch import Tensor, nn
from workload import CLASSES, FEATURES, Classifier, Size, TimedBatches, loader_of, make_batches, network

from equipoise import Trainer

TOKENS, WIDTH = 8, 32
MOST_OF_AUTO = 1.02
"""The most that a step with `compile="auto"` may take, as a multiple of the hand-written loop's time."""
TRUSTED = 0.03
"""The share by which the second hand-written row may be off; beyond that there is no verdict for the network."""


class Convolutions(nn.Module):
    """(32, 32) → (32, 10), three convolutions over an image of 8 by 4."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((1, 16), (16, 32), (32, 32)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        images = features.view(-1, 1, TOKENS, FEATURES // TOKENS)
        return self.head(self.layers(images).mean((2, 3)))


class Encoder(nn.Module):
    """(32, 32) → (32, 10), two transformer layers over eight tokens, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(FEATURES // TOKENS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        tokens = self.embedding(features.view(-1, TOKENS, FEATURES // TOKENS))
        return self.head(self.layers(tokens).mean(1))


class Recurrent(nn.Module):
    """(32, 32) → (32, 10), an LSTM over eight tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(FEATURES // TOKENS, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        outputs, _ = self.lstm(features.view(-1, TOKENS, FEATURES // TOKENS))
        return self.head(outputs[:, -1])


def wide() -> nn.Module:
    """(32, 32) → (32, 10), large matrix products."""
    return nn.Sequential(
        nn.Linear(FEATURES, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, CLASSES)
    )


def normalised() -> nn.Module:
    """(32, 32) → (32, 10), many small operations."""
    layers: list[nn.Module] = []
    for _ in range(10):
        layers += [nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(FEATURES, CLASSES))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "32-64-64-10": network,
    "32-1024-1024-10": wide,
    "10 BatchNorms": normalised,
    "convolutions": Convolutions,
    "transformer": Encoder,
    "LSTM": Recurrent,
}
WAYS: dict[str, Any] = {"eager": False, 'compile="auto"': "auto", "compile=True": True}


def by_hand(make: Callable[[], nn.Module], data: TimedBatches) -> nn.Module:
    """Train a network by an eager loop."""

    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return make()

    return train(data, make=seeded)


def fit(make: Callable[[], nn.Module], way: str, data: TimedBatches) -> nn.Module:
    """Train a network with the Trainer."""
    torch.manual_seed(0)
    module = Classifier()
    torch.manual_seed(0)
    module.network = make()  # type: ignore[assignment]
    trainer = quiet_trainer(Trainer, compile=WAYS[way])
    trainer.fit(module, loader_of(data))
    return module.network


def entries(name: str) -> list[Entry]:
    """Return who takes part for a network, the hand-written loop first."""
    make = NETWORKS[name]
    loops: list[Entry] = [Entry(name, way, way, partial(by_hand, make)) for way in (BY_HAND, NOISE)]
    trainers: list[Entry] = []
    for way in WAYS:
        run: Contestant = partial(fit, make, way)
        trainers.append(Entry(name, way, way, run))
    return [*loops, *trainers]


def lines(rows: list[Row]) -> list[list[str]]:
    """Return the table, titles first."""
    table = [["network", "", "µs per step", "ratio", "rounds"]]
    for row in rows:
        ratio = "" if row.name == BY_HAND else f"{row.ratio:.3f}"
        table.append([row.group, row.name, f"{row.time:.1f}", ratio, str(row.rounds)])
    return table


def conclude(console: Console, rows: list[Row]) -> int:
    """Print the verdict, and return the exit code of `--check`."""
    noise = {row.group: abs(row.ratio - 1) for row in rows if row.name == NOISE}
    without_verdict = [name for name, share in noise.items() if share > TRUSTED]
    broken = []
    for row in rows:
        is_of_auto = row.name == 'compile="auto"'
        if is_of_auto and row.group not in without_verdict and row.ratio > MOST_OF_AUTO:
            broken.append(row)
    for row in broken:
        console.print(f"Bound broken: {row.group}: {row.ratio:.3f}, at most {MOST_OF_AUTO} is allowed.")
    if without_verdict:
        console.print(f"No verdict on a busy machine: {', '.join(without_verdict)}.")
    if broken:
        return 1
    return 2 if without_verdict else 0


def main(command: list[str] | None = None) -> int:
    """Measure, print the table and the verdict, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="shuffled rounds (default: 8)")
    parser.add_argument("--steps", type=int, default=300, help="timed steps of each run (default: 300)")
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS), help="(default: all)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there, for the README")
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if a bound is broken, with 2 without a verdict"
    )
    options, console = parser.parse_args(command), Console()
    console.width = max(console.width, 100)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    # A trial and a comparison are over before the clock starts.
    size = Size(options.steps, 40)
    rows: list[Row] = []
    for name in options.networks:
        print(f"{name}", file=sys.stderr, flush=True)
        batches = make_batches()
        rows += measure(entries(name), batches, size=size, rounds=options.rounds, seed=0, report=lambda done: None)
    titles, *table = lines(rows)
    text = [f"| {' | '.join(line)} |" for line in (titles, ["---"] * 2 + ["---:"] * 3, *table)]
    for line in text:
        console.print(line, markup=False, highlight=False)
    if options.markdown is not None:
        options.markdown.write_text("\n".join(text) + "\n")
    code = conclude(console, rows)
    return code if options.check else 0


if __name__ == "__main__":
    sys.exit(main())
