"""Cost of a step of virtual devices beside one without them, on one device and in two processes."""

import argparse
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.virtual_devices.others import Task
from equipoise import DDPStrategy, Trainer, VirtualDevicesStrategy

FIRST_STEPS = 3


class Transformer(nn.Module):
    """Two layers of attention over 32 positions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.outer = nn.Linear(64, 10)

    def forward(self, features: Tensor) -> Tensor:
        """Return scores from the mean over the positions."""
        return self.outer(self.layers(self.inner(features)).mean(1))


def perceptron() -> nn.Module:
    """Return three layers of 256."""
    layers = [nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(256, 10))


def convolutions() -> nn.Module:
    """Return three convolutions with statistics of a batch."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 4 * 4, 10))


# A network, the shape of a sample, and the number of samples of a step.
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "perceptron, 64 samples": (perceptron, (256,), 64),
    "perceptron, 2048 samples": (perceptron, (256,), 2048),
    "convolutions, 128 samples": (convolutions, (3, 32, 32), 128),
    "transformer, 64 samples": (Transformer, (32, 8), 64),
}


class Timed(NamedTuple):
    """A measurement.

    Attributes:
        steps: The number of steps.
        clock: Function that returns seconds: processor time of the process, or time by the clock on the wall.
    """

    steps: int
    clock: Callable[[], float]


class Classifier(Task):
    """Trains a network on random classes.

    Args:
        network: The network.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network, nn.functional.cross_entropy)

    def configure_optimizers(self) -> Any:
        """Return the optimiser."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Timing(L.Callback):
    """Writes the median of the seconds of steps of the first process, without the first steps, into a file.

    Args:
        path: The file.
        clock: Function that returns seconds.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self.path = path
        self.clock = clock
        self.ends: list[float] = []

    def on_train_start(self, *arguments: Any) -> None:
        """Compute in one thread, as virtual devices do."""
        torch.set_num_threads(1)

    def on_train_batch_end(self, *arguments: Any) -> None:
        """Note the end of a step."""
        self.ends.append(self.clock())

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Write."""
        if trainer.global_rank == 0:
            seconds = [end - begin for begin, end in pairwise(self.ends)]
            self.path.write_text(str(median(seconds[FIRST_STEPS:])))


def seconds_of(case: str, strategy: Any, processes: int, timed: Timed, *, in_step: int = 1) -> float:
    """Train, and return the seconds of a step.

    Args:
        case: The name of the case.
        strategy: The strategy.
        processes: The number of processes.
        timed: What is measured.
        in_step: The number of batches of the loader in a step. Default: 1.
    """
    build, shape, samples = CASES[case]
    L.seed_everything(0, verbose=False)
    rows = samples * 4
    data = TensorDataset(torch.randn(rows, *shape), torch.randint(10, (rows,)))
    loader = DataLoader(data, batch_size=samples // in_step, shuffle=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "seconds.txt")
        trainer = Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=processes,
            max_steps=FIRST_STEPS + 1 + timed.steps,
            callbacks=[Timing(path, timed.clock)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Classifier(build()), loader)
        return float(path.read_text())


def contestants(case: str, timed: Timed) -> dict[str, Callable[[], float]]:
    """Return functions that measure a step of a case, by what they measure."""

    def virtual(count: int, processes: int) -> Callable[[], float]:
        return lambda: seconds_of(case, VirtualDevicesStrategy(count=count), processes, timed)

    return {
        "single_device": lambda: seconds_of(case, "single_device", 1, timed),
        "virtual, 4 parts": virtual(4, 1),
        "virtual, 8 parts": virtual(8, 1),
        # Two batches of half the size are a step of two processes.
        "ddp, 2 processes": lambda: seconds_of(case, DDPStrategy(), 2, timed, in_step=2),
        "virtual, 8 parts, 2 processes": virtual(8, 2),
    }


def main() -> None:
    """Measure all cases in rounds, and print the table of medians and of their ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how often everything is measured, in turn")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each measurement")
    parser.add_argument("--seconds", type=float, default=130, help="begin no round of a case after its share of these")
    parser.add_argument("--wall", action="store_true", help="time by the clock on the wall, for an idle machine")
    options = parser.parse_args()
    timed = Timed(options.steps, time.perf_counter if options.wall else time.process_time)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print("| step | single_device, ms | 4 parts | 8 parts | ddp in 2 processes, ms | 8 parts in 2 processes | rounds |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for case in CASES:
        end = time.perf_counter() + options.seconds / len(CASES)
        found: list[dict[str, float]] = []
        while len(found) < options.rounds and (not found or time.perf_counter() < end):
            found.append({name: measure() for name, measure in contestants(case, timed).items()})
        print(f"| {case} |", _row(found), flush=True)


def _row(found: list[dict[str, float]]) -> str:
    """Return milliseconds of the runs without virtual devices, and the medians of ratios within rounds."""

    def ratio(name: str, other: str) -> str:
        return f"x {median(times[name] / times[other] for times in found):.2f}"

    def milliseconds(name: str) -> str:
        return f"{1000 * median(times[name] for times in found):.1f}"

    cells = [
        milliseconds("single_device"),
        ratio("virtual, 4 parts", "single_device"),
        ratio("virtual, 8 parts", "single_device"),
        milliseconds("ddp, 2 processes"),
        ratio("virtual, 8 parts, 2 processes", "ddp, 2 processes"),
        str(len(found)),
    ]
    return " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
