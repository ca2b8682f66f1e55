"""Cells of the table: training on a mesh, beside the same on one device."""

import math
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.device_mesh.networks import NETWORKS, Network, Task
from equipoise import ConfigurationError, FSDPStrategy, StepError, Trainer
from equipoise.strategies.distributed.process_group import ProcessGroup

__all__ = ["MESHES", "cells", "fit", "largest_difference", "on_one_device", "processes_of"]

# The batches of a step, and the options of the strategy.
MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "tensor 2": (1, {"tensor": 2}),
    "tensor 4": (1, {"tensor": 4}),
    "tensor 2 x data 2": (2, {"tensor": 2}),
    "context 2": (1, {"context": 2}),
    "context 4": (1, {"context": 4}),
    "context 2 x data 2": (2, {"context": 2}),
    "tensor 2 x context 2": (1, {"tensor": 2, "context": 2}),
}
STEPS = 10
BATCH = 4

Weights = dict[str, Tensor]


def processes_of(mesh: str) -> int:
    """Return the number of processes of a mesh."""
    rows, sizes = MESHES[mesh]
    return rows * math.prod(sizes.values())


def on_one_device(name: str) -> Weights:
    """Return the weights of a network after ten steps on one device."""
    return fit(NETWORKS[name], "single_device", 1, 1)


def fit(network: Network, strategy: Any, processes: int, rows: int, callbacks: Sequence[Any] = ()) -> Weights:
    """Train for ten steps in float64, and return the weights.

    Args:
        network: The network.
        strategy: The strategy.
        processes: The number of processes.
        rows: The number of batches of a step.
        callbacks: The callbacks. Default: none.
    """
    torch.manual_seed(3)
    task = Task(network.make())
    for parameter in task.parameters():
        nn.init.normal_(parameter, std=0.2)
    trainer = Trainer(
        strategy=strategy,
        devices=["cpu"] * processes,
        precision="64-true",
        max_epochs=1,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    draw = torch.Generator().manual_seed(1)
    samples = [network.draw(draw) for _ in range(STEPS * BATCH)]
    trainer.fit(task, DataLoader(samples, batch_size=BATCH // rows))  # type: ignore[arg-type]
    return {name: parameter.detach() for name, parameter in task.named_parameters()}


def cells(expected: dict[str, Weights], meshes: Sequence[str]) -> dict[tuple[str, str], str]:
    """Return the cells of networks and of meshes with the same number of processes, which are started once.

    Args:
        expected: The weights of each network on one device.
        meshes: The meshes.
    """
    return _in_processes(processes_of(meshes[0]), partial(_all_cells, expected, meshes))


def _in_processes(count: int, function: Callable[[], Any]) -> Any:
    """Return what a function returns in the first of several processes."""
    devices = [torch.device("cpu")] * count
    group = ProcessGroup(devices, 1, timeout=300.0, backend=None, on_joined=_nothing)
    return group.launch(function)


def _nothing() -> None:
    pass


def _all_cells(expected: dict[str, Weights], meshes: Sequence[str]) -> dict[tuple[str, str], str]:
    warnings.simplefilter("ignore")
    # Processes share the cores.
    torch.set_num_threads(1)
    found = {}
    for name, weights in expected.items():
        for mesh in meshes:
            found[name, mesh] = _cell(NETWORKS[name], mesh, weights)
            if dist.get_rank() == 0:
                print(f"{name}, {mesh}: {found[name, mesh]}", file=sys.stderr, flush=True)
    return found


def _cell(network: Network, mesh: str, expected: Weights) -> str:
    """Return the largest difference of a weight, or the first sentence of a refusal."""
    rows, sizes = MESHES[mesh]
    options: dict[str, Any] = dict(sizes)
    if "tensor" in sizes:
        options["tensor_plan"] = network.plan
    if "context" in sizes:
        options["context_blocks"] = network.blocks
    strategy = FSDPStrategy(data=rows, timeout=300.0, **options)
    try:
        weights = fit(network, strategy, processes_of(mesh), rows)
    except (ConfigurationError, StepError) as error:
        return f"refused: {str(error).split('. ')[0]}"
    return f"{largest_difference(weights, expected):.1e}"


def largest_difference(weights: Weights, expected: Weights) -> float:
    """Return the largest difference of a weight."""
    largest = 0.0
    for name, weight in weights.items():
        difference = (weight - expected[name]).abs().max()
        largest = max(largest, float(difference))
    return largest
