"""Time of a comparison in two processes, beside that of a step and of an epoch of a thousand steps."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from base import Program, fit
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from equipoise.formats import format_count
from equipoise.parallel.communication.object_exchange import gather_objects
from equipoise.parallel.communication.processes import Processes
from equipoise.parallel.divergence.replica_check import ReplicaCheck
from equipoise.parallel.divergence.replicated import Replicated, unchanging_buffers, whole_module

__all__ = ["measure"]

STEPS = 1000


class Connected(Processes):
    """All processes of the default group."""

    def gather_objects(self, value: Any) -> list[Any]:
        return gather_objects(value)


class Timed(Program):
    """Notes the time of steps and of comparisons.

    Args:
        network: (batch, width) → (batch, width).
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.net = network
        self.steps: list[float] = []
        self.comparisons: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        return self.net(batch[0]).square().mean()

    def on_train_start(self) -> None:
        replicated = Replicated(whole_module(self), unchanging_buffers(self))
        self.check = ReplicaCheck(lambda: replicated, Connected(), 0)
        self.last = time.perf_counter()

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.steps.append(time.perf_counter() - self.last)
        dist.barrier()
        started = time.perf_counter()
        self.check.compare(self.global_step)
        self.comparisons.append(time.perf_counter() - started)
        self.last = time.perf_counter()

    def on_train_end(self) -> None:
        del self.check


def repeated(count: int, make: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(*(make() for _ in range(count)))


def images() -> nn.Module:
    """Convolutions of a residual network for small images."""
    layers: list[nn.Module] = [nn.Unflatten(1, (3, 32, 32)), nn.Conv2d(3, 32, 3, padding=1)]
    for _ in range(8):
        layers += [nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)]
    return nn.Sequential(*layers)


# By what they are: the width of a sample, the samples of a process, and the network.
NETWORKS: dict[str, tuple[int, int, Callable[[], nn.Module]]] = {
    "a perceptron": (32, 32, lambda: repeated(3, lambda: nn.Linear(32, 32))),
    "500 small layers": (32, 32, lambda: repeated(500, lambda: nn.Linear(32, 32))),
    "convolutions": (3 * 32 * 32, 32, images),
    "3 large layers": (2048, 32, lambda: repeated(3, lambda: nn.Linear(2048, 2048))),
    "3 larger layers": (4096, 32, lambda: repeated(3, lambda: nn.Linear(4096, 4096))),
}


def measure() -> None:
    """Print the table."""
    table = Table("network", "tensors", "parameters", "step, ms", "comparison, ms", f"% of {STEPS} steps")
    for name, (width, samples, make) in NETWORKS.items():
        module = Timed(make())
        loader = DataLoader(TensorDataset(torch.randn(24 * samples, width)), batch_size=samples)
        fit(module, "ddp", lambda loader=loader: loader, max_epochs=1)
        step, comparison = median(module.steps[2:]), median(module.comparisons[2:])
        tensors = list(module.net.parameters())
        table.add_row(
            name,
            str(len(tensors)),
            format_count(sum(tensor.numel() for tensor in tensors)),
            f"{step * 1e3:.2f}",
            f"{comparison * 1e3:.2f}",
            f"{100 * comparison / (STEPS * step):.3f}",
        )
    Console(width=120).print(table)
