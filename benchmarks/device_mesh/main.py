"""Do networks that were written for one device train as on one where several compute each batch together?"""

import argparse
import math
import sys
import time
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.device_mesh.networks import NETWORKS, Network, Task
from equipoise import ConfigurationError, FSDPStrategy, StepError, Trainer

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


def fit(task: Task, network: Network, strategy: Any, processes: int, rows: int) -> dict[str, Tensor]:
    """Train for ten steps in float64, and return the weights."""
    trainer = Trainer(
        strategy=strategy,
        devices=["cpu"] * processes,
        precision="64-true",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    draw = torch.Generator().manual_seed(1)
    samples = [network.draw(draw) for _ in range(STEPS * BATCH)]
    trainer.fit(task, DataLoader(samples, batch_size=BATCH // rows))  # type: ignore[arg-type]
    return {name: parameter.detach() for name, parameter in task.named_parameters()}


def compare(task: Task, network: Network, expected: dict[str, Tensor], rows: int, sizes: dict[str, int]) -> str:
    """Return the largest difference of a weight, or the first sentence of a refusal."""
    options: dict[str, Any] = dict(sizes)
    if "tensor" in sizes:
        options["tensor_plan"] = network.plan
    if "context" in sizes:
        options["context_blocks"] = network.blocks
    strategy = FSDPStrategy(data=rows, timeout=300.0, **options)
    processes = rows * math.prod(sizes.values())
    try:
        weights = fit(task, network, strategy, processes, rows)
    except (ConfigurationError, StepError) as error:
        return f"refused: {str(error).split('. ')[0]}"
    largest = 0.0
    for name, weight in weights.items():
        difference = (weight - expected[name]).abs().max()
        largest = max(largest, float(difference))
    return f"{largest:.1e}"


def main() -> None:
    """Train all networks on all meshes, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", choices=[*NETWORKS], default=[*NETWORKS], help="default: all")
    parser.add_argument("--meshes", nargs="+", choices=[*MESHES], default=[*MESHES], help="default: all")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    begin = time.perf_counter()
    meshes = {name: MESHES[name] for name in options.meshes}
    print("| network |", " | ".join(meshes), "|\n| --- |", " | ".join("---" for _ in meshes), "|")
    for name in options.networks:
        network = NETWORKS[name]
        torch.manual_seed(3)
        task = Task(network.make())
        for parameter in task.parameters():
            nn.init.normal_(parameter, std=0.2)
        expected = fit(deepcopy(task), network, "single_device", 1, 1)
        cells = []
        for rows, sizes in meshes.values():
            cell = compare(deepcopy(task), network, expected, rows, sizes)
            cells.append(cell)
        print(f"| {name} |", " | ".join(cells), "|", flush=True)
    print(f"\n{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
